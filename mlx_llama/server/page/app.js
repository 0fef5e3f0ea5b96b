import { ApiError, ask, cancelJob, follow, setKey, startJob } from "./api.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const trusted = window.trustedTypes?.createPolicy("page", { createHTML: (html) => html }) ?? { createHTML: (html) => html };
const RENDER_MILLISECONDS = 120;
const SAVE_MILLISECONDS = 500;
const REPETITION_LIMIT = 200; // as in the chat of a terminal: repetition.py
const MOST_ATTACHED = 1 << 20; // bytes of a file
const ANSWERING = "mlx_llama answering"; // in sessionStorage: the answer that this tab was writing

const GUIDE = /mlx_llama[\\/]guide[\\/]?$/; // the path of the model that comes with the package
const QUESTIONS = ["What can you help me with?", "Explain what a llama is to a child.", "Write a short, polite e-mail that declines an invitation.",
  "Write a Python function that counts the words of a text."];

let conversation = store.create();
let running = null; // { controller, node }
let table = {}; // options: name -> field of the OpenAPI document
let defaults = {}; // options in force without others
let context = 0; // positions
let modelName = "mlx_llama";
let modelPath = "";
let backendName = "";
let examples = []; // questions of the model's card
let hasSwitch = false; // thoughts can be turned off
let hasAsides = false; // the model's answers may have texts beside them
let isLeaving = false; // the tab is being closed or reloaded
const rendered = new Map(); // text -> HTML

function make(kind, properties = {}, ...children) {
  const found = Object.assign(document.createElement(kind), properties);
  found.append(...children);
  return found;
}

function say(text) {
  $("status").textContent = text;
}

function save() {
  if (!store.save(conversation)) say("The browser's storage is full: delete conversations, or export this one.");
  showList();
}

// The conversation

function showList() {
  const entries = store.search($("search").value);
  $("conversations").replaceChildren(...entries.map((entry) => {
    const row = make("li", {},
      make("button", { className: "pick", textContent: entry.title, onclick: () => open(entry.id) }),
      make("button", { className: "rename", textContent: "✎", title: "Rename", ariaLabel: `Rename ${entry.title}`, onclick: () => rename(entry) }),
      make("button", { className: "drop", textContent: "✕", ariaLabel: `Delete ${entry.title}`, onclick: () => drop(entry) }));
    row.setAttribute("aria-current", entry.id === conversation.id);
    return row;
  }));
}

function open(id) {
  const found = store.load(id);
  if (!found) return;
  stop();
  conversation = found;
  sessionStorage.setItem("mlx_llama open", id);
  openSidebar(false);
  show();
}

function rename({ id, title }) {
  const wanted = prompt("New name of this conversation", title)?.trim().slice(0, 200);
  const renamed = id === conversation.id ? conversation : store.load(id);
  if (!wanted || !renamed) return;
  renamed.title = wanted;
  store.save(renamed);
  showTitle();
  showList();
}

function showTitle() {
  $("title").textContent = conversation.title;
  document.title = `${conversation.title} · mlx_llama`;
}

function drop(entry) {
  if (!confirm(`Delete “${entry.title}”?`)) return;
  store.remove(entry.id);
  if (entry.id === conversation.id) begin();
  else showList();
}

function begin() {
  stop();
  say("");
  const { system, options } = conversation;
  conversation = Object.assign(store.create(), { system, options });
  openSidebar(false);
  show();
  $("question").focus();
}

function show() {
  showTitle();
  const focused = document.activeElement.closest("#log button");
  const label = focused?.ariaLabel;
  const id = focused?.closest("[data-id]")?.dataset.id;
  const pending = [];
  const messages = store.path(conversation).map((node) => showMessage(node, pending));
  $("log").replaceChildren(...messages);
  if (!messages.length) showWelcome();
  showList();
  showSwitch();
  showMemory();
  if (id) focusTool(id, label);
  scroll(true);
  // Rendered Markdown has another height.
  Promise.all(pending).then(() => messages.at(-1)?.isConnected && scroll(true));
}

// Focus a button of a message again, after the messages were drawn anew.
function focusTool(id, label) {
  const tool = document.querySelector(`[data-id="${id}"] [aria-label="${label}"]:enabled`);
  (tool ?? $("log")).focus({ preventScroll: true });
}

// The first question that the model still sees in this path, by the newest answer that was told; undefined: all.
const remembered = (nodes) => nodes.findLast((node) => node.context === context)?.memory;

// The context in use, and where the model's memory begins.
function showMemory() {
  const nodes = store.path(conversation);
  showUsage(nodes.findLast((node) => node.usage)?.usage);
  document.querySelector(".memory")?.remove();
  const first = remembered(nodes);
  document.querySelector(`[data-id="${first}"]`)?.before(make("p", { className: "memory",
    textContent: `The model no longer sees what is above: its memory holds ${context} tokens.` }));
}

function showMessage(node, pending) {
  const text = make("div", { className: "text" });
  const tools = make("div", { className: "tools" });
  const article = make("article", { className: `message ${node.role}` }, text);
  if (node.thought) showThought(article, node);
  article.dataset.id = node.id;
  article.ariaLabel = node.role === "user" ? "You" : "Answer";
  if (node.role === "user") text.textContent = node.text;
  else pending.push(showMarkdown(text, node.text));
  if (node.error) article.append(make("p", { className: "error", textContent: node.error, role: "alert" }));
  for (const aside of node.asides || []) {
    const passage = make("div", { className: "passage", ariaLabel: "Passages from the documentation" });
    pending.push(showMarkdown(passage, aside.text));
    if (aside.is_first) article.prepend(passage);
    else article.append(passage);
  }
  article.append(tools);
  showTools(tools, node);
  return article;
}

// The thought above an answer, folded unless the user opens it.
function showThought(article, node) {
  let details = article.querySelector(".thought");
  if (!details) {
    details = make("details", { className: "thought" }, make("summary"), make("div"));
    article.prepend(details);
  }
  const [summary, text] = details.children;
  const seconds = node.thoughtSeconds === undefined ? "" : ` for ${node.thoughtSeconds.toFixed(1)} s`;
  summary.textContent = seconds ? `Thought${seconds}` : running?.node === node ? "Thinking …" : "Thought";
  text.textContent = node.thought;
}

function showTools(tools, node) {
  const found = store.siblings(conversation, node);
  const at = found.findIndex((other) => other.id === node.id);
  const button = (label, text, onclick, disabled = false) =>
    make("button", { type: "button", textContent: text, ariaLabel: label, title: label, onclick, disabled });
  const parts = [];
  if (found.length > 1) {
    parts.push(button("Previous branch", "‹", () => pick(found[at - 1]), at === 0 || !!running),
      make("span", { textContent: `${at + 1}/${found.length}` }),
      button("Next branch", "›", () => pick(found[at + 1]), at === found.length - 1 || !!running));
  }
  if (node.role === "user") {
    parts.push(button("Edit this question", "Edit", () => edit(node), !!running));
  } else {
    if (node.isCut && node.id === conversation.leaf) parts.push(button("Continue this answer", "Continue", () => run(node), !!running));
    parts.push(button("Answer again", "Regenerate", () => answer(node.parent), !!running));
    if (node.text) parts.push(button("Copy this answer", "Copy", () => copy(node.text)));
    if (node.note) parts.push(make("span", { className: "note", textContent: node.note }));
  }
  tools.replaceChildren(...parts);
}

function pick(node) {
  const label = document.activeElement.ariaLabel;
  store.choose(conversation, node);
  save();
  show();
  focusTool(node.id, label);
}

// The first screen: the model, what it is good for, and questions to click.
function showWelcome() {
  if (!context) return; // the model is not known yet
  const about = GUIDE.test(modelPath)
    ? ["This is the guide that comes with mlx_llama, a tiny model of 4 million parameters.",
      "It answers questions about the project and makes small talk. It knows nothing else, and is sometimes wrong."]
    : [`This is ${modelName}, running on this machine's ${backendName}. Nothing you write leaves this server.`,
      "It writes, explains and answers in conversation. It can be wrong: check what matters."];
  const questions = examples.length ? examples : QUESTIONS;
  const more = GUIDE.test(modelPath) ? [make("p", {}, "A model that knows more: start the server with ",
    make("code", { textContent: "--model smollm2" }), ", ", make("code", { textContent: "llama3.2" }), ", ", make("code", { textContent: "qwen3" }),
    " or any Llama-family model of the Hugging Face hub, such as ", make("code", { textContent: "HuggingFaceTB/SmolLM2-360M-Instruct" }), ".")] : [];
  $("log").replaceChildren(make("section", { className: "welcome", ariaLabel: "Welcome" },
    make("h2", { textContent: modelName }), ...about.map((textContent) => make("p", { textContent })),
    make("div", { className: "ideas" }, ...questions.map((textContent) =>
      make("button", { type: "button", className: "plain", textContent, onclick: () => !running && question(textContent, conversation.leaf) }))),
    ...more));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say("The browser does not let this page copy.");
  }
}

function edit(node) {
  const byKey = document.activeElement === $("question");
  const cancel = () => {
    if (area.value !== node.text && !confirm("Discard the changes to this question?")) return;
    show();
    if (byKey) $("question").focus();
    else focusTool(node.id, "Edit this question");
  };
  const article = document.querySelector(`[data-id="${node.id}"]`);
  const area = make("textarea", { value: node.text, ariaLabel: "Edited question" });
  const form = make("form", { className: "edit" }, area, make("div", { className: "row end" },
    make("button", { type: "button", className: "plain", textContent: "Cancel", onclick: cancel }),
    make("button", { textContent: "Ask again" })));
  form.onsubmit = (event) => {
    event.preventDefault();
    if (area.value.trim()) question(area.value, node.parent);
  };
  area.onkeydown = (event) => {
    if (event.key === "Escape") cancel();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  };
  article.replaceChildren(form);
  area.focus();
}

// Markdown, by the server

async function fetchMarkdown(text) {
  if (!rendered.has(text)) {
    const { html } = await ask("/page/render", { text });
    if (rendered.size > 200) rendered.clear();
    rendered.set(text, html);
  }
  return rendered.get(text);
}

async function showMarkdown(element, text) {
  if (!rendered.has(text)) element.textContent ||= text;
  try {
    putHtml(element, await fetchMarkdown(text));
  } catch {
    element.textContent = text;
  }
}

function putHtml(element, html) {
  element.innerHTML = trusted.createHTML(html);
  for (const block of element.querySelectorAll("pre")) {
    block.append(make("button", { type: "button", className: "copy", textContent: "Copy", ariaLabel: "Copy this code",
      onclick: () => copy(block.querySelector("code").textContent) }));
  }
}

// Shows a growing text: one rendering at a time, the newest text next.
class Growing {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.shown = null;
    this.busy = null;
  }

  push(text) {
    this.text = text;
    this.busy ??= this.run();
  }

  async run() {
    while (this.shown !== this.text) {
      const text = this.text;
      try {
        const { html } = await ask("/page/render", { text });
        putHtml(this.element, html);
      } catch {
        this.element.textContent = text;
      }
      this.shown = text;
      scroll();
      await new Promise((resolve) => setTimeout(resolve, RENDER_MILLISECONDS));
    }
    this.busy = null;
  }
}

// Questions and answers

function question(text, parent, title = text) {
  const node = store.add(conversation, parent, "user", text);
  if (parent === null && Object.values(conversation.nodes).length === 1) conversation.title = title.trim().slice(0, 60);
  answer(node.id);
}

// Text files that the next question will have: { name, text, tokens }
let attached = [];

async function attach(files) {
  for (const file of files) {
    const text = await file.text();
    if (file.size > MOST_ATTACHED || /[\0\uFFFD]/.test(text)) {
      say(`${file.name}: only text files in UTF-8, of up to ${MOST_ATTACHED >> 20} MB, can be attached.`);
      continue;
    }
    const entry = { name: file.name, text };
    attached.push(entry);
    showAttached();
    try {
      entry.tokens = (await ask("/tokenize", { content: text, parse_special: false })).tokens.length;
    } catch (error) {
      say(explain(error));
    }
    showAttached();
  }
}

function showAttached() {
  $("attached").hidden = !attached.length;
  $("attached").replaceChildren(...attached.map((entry) => make("li", {}, `${entry.name} · ${entry.tokens ?? "…"} tokens`,
    make("button", { type: "button", className: "drop", textContent: "✕", ariaLabel: `Remove ${entry.name}`, onclick: () => {
      attached = attached.filter((other) => other !== entry);
      showAttached();
      $("question").focus();
    } }))));
}

// A question after the attached files, each in a fence that is longer than those in it.
function withFiles(question) {
  const parts = attached.map(({ name, text }) => {
    const longest = [...text.matchAll(/`+/g)].reduce((most, [run]) => Math.max(most, run.length), 2);
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text}\n${fence}`;
  });
  attached = [];
  showAttached();
  return [...parts, question].join("\n\n");
}

function answer(parent) {
  if (!running) run(store.add(conversation, parent, "assistant", ""));
}

// Ask for an answer, or for the rest of one that was cut.
async function start(node, owner, signal) {
  if (!node.text) delete node.thought;
  Object.assign(node, { began: Date.now(), first: undefined, seen: -1 });
  const nodes = store.said(owner, node.parent);
  const from = Math.max(0, nodes.findIndex((other) => other.id === remembered([...nodes, node])));
  const messages = nodes.slice(from).map(store.toMessage);
  if (owner.system) messages.unshift({ role: "system", content: owner.system });
  if (node.text) messages.push({ role: "assistant", content: node.text });
  const body = { messages, repetition_limit: defaults.repetition_limit, ...owner.options, truncation: "auto" };
  if (node.text && node.thought) body.reasoning = "off"; // the thought is over
  const { job, dropped } = await startJob(body, signal);
  Object.assign(node, { job, context, memory: from + dropped ? nodes[from + dropped].id : undefined });
  if (owner === conversation) showMemory();
}

// The events of an answer's job. It is a new one unless a page before this one has started it and it is still known.
async function* eventsOf(node, owner, signal) {
  if (node.job) {
    try {
      return yield* follow(node.job, node.seen, signal);
    } catch (error) {
      if (error.status !== 404) throw error;
    }
  }
  await start(node, owner, signal);
  yield* follow(node.job, node.seen, signal);
}

// Write an answer, or go on with one.
async function run(node) {
  if (running) return;
  const owner = conversation;
  const begun = node.text;
  delete node.asides;
  delete node.error;
  node.isCut = true; // until it ends
  sessionStorage.setItem(ANSWERING, node.id);
  const controller = new AbortController();
  running = { controller, node };
  save();
  show();
  const article = document.querySelector(`[data-id="${node.id}"]`);
  article.classList.add("running");
  busy(true);
  const growing = new Growing(article.querySelector(".text"));
  let saved = performance.now();
  let reason = "";
  const endThought = () => {
    if (begun || !node.thought || node.thoughtSeconds !== undefined) return;
    node.thoughtSeconds = (Date.now() - node.began - node.first) / 1000;
    showThought(article, node);
  };
  try {
    for await (const event of eventsOf(node, owner, controller.signal)) {
      node.seen = event.id;
      if (event.name === "started") node.promptTokens = event.prompt_tokens;
      if (event.t) node.first ??= Date.now() - node.began;
      if (event.name === "thought") {
        node.thought = (node.thought || "") + event.t;
        showThought(article, node);
        scroll();
      }
      if (event.name === "token") {
        endThought();
        node.text += event.t;
        growing.push(node.text);
      }
      node.usage = node.promptTokens + (event.tokens_out ?? (event.i ?? -1) + 1);
      if (owner === conversation) showUsage(node.usage);
      if (performance.now() - saved > SAVE_MILLISECONDS) {
        store.save(owner);
        saved = performance.now();
      }
      if (event.name === "end") {
        reason = event.stop_reason;
        delete node.job;
        if (event.error) throw new ApiError(event.error, 500);
        node.isCut = ["MAX_TOKENS", "CANCELLED"].includes(reason);
        node.note = describe(event, node);
        const others = store.siblings(owner, node).filter((other) => other !== node);
        if (others.some((other) => other.text === node.text)) {
          node.note += " · the same words as before: raise the temperature in the settings for others";
        }
      }
    }
  } catch (error) {
    if (isLeaving) return; // the reloaded page goes on
    if (error.name === "AbortError") {
      node.note = "stopped";
      if (node.job) cancelJob(node.job).catch(() => {});
      delete node.job;
    } else node.error = explain(error);
  }
  const question = owner.nodes[node.parent].text;
  if (hasAsides && ["EOS", "STOP_SEQUENCE"].includes(reason)) node.asides = await findAsides(question);
  endThought();
  running = null;
  sessionStorage.removeItem(ANSWERING);
  node.isCut &&= !!node.text;
  busy(false);
  // An answer without a text is no branch worth keeping, unless it says why.
  if (!node.text && !node.thought && !node.error && node.note === "stopped") {
    delete owner.nodes[node.id];
    owner.leaf = node.parent;
  }
  if (store.load(owner.id) && !store.save(owner)) say("The browser's storage is full: delete conversations.");
  if (owner === conversation) {
    await growing.busy;
    if (!running && owner === conversation) show();
  }
  say(node.error ? "The answer failed." : node.note === "stopped" ? "Stopped." : "Answered.");
}

// The texts beside the answer to a question.
async function findAsides(question) {
  try {
    return (await ask("/page/see-also", { question })).asides;
  } catch {
    return [];
  }
}

function describe({ tokens_out, reasoning_tokens, decode_time_ms, stop_reason, repeated }, { first }) {
  if (stop_reason === "CANCELLED") return "stopped";
  const speed = (tokens_out - 1) / decode_time_ms * 1000;
  return [`${tokens_out} tokens${reasoning_tokens ? ` (${reasoning_tokens} of a thought)` : ""}`, speed > 0 ? `${speed.toFixed(1)} tokens/s` : "",
    first === undefined ? "" : `first after ${(first / 1000).toFixed(2)} s`,
    repeated ? "ended because it repeats itself: Continue goes on" : stop_reason === "MAX_TOKENS" ? "cut at the limit" : ""].filter(Boolean).join(" · ");
}

function explain(error) {
  if (error instanceof ApiError && error.status === 401) {
    $("key-dialog").showModal();
    return "The server needs an API key. Regenerate the answer once it is set.";
  }
  if (error instanceof ApiError && error.retryAfter) return `${error.message}\nTry again in ${error.retryAfter} s.`;
  return error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
}

function stop() {
  running?.controller.abort();
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  say(is ? "Answering …" : "");
}

function scroll(always = false) {
  const area = document.querySelector("main");
  if (always || area.scrollHeight - area.scrollTop - area.clientHeight < 120) area.scrollTop = area.scrollHeight;
}

// The meter is green to three quarters, then amber, and red when there is hardly room for a line.
function showUsage(used = 0) {
  $("context").hidden = !context;
  Object.assign($("context-meter"), { max: context || 1, low: context * 0.75, high: context * 0.95, optimum: 0 });
  $("context-meter").value = used;
  $("context-text").textContent = `${used} / ${context}`;
}

// Settings

// The switch beside the question, of models whose template has one.
function showSwitch() {
  $("think").hidden = !hasSwitch;
  $("think-switch").checked = (conversation.options.reasoning ?? defaults.reasoning) !== "off";
}

$("think-switch").onchange = (event) => {
  conversation.options = { ...conversation.options, reasoning: event.target.checked ? "on" : "off" };
  if (conversation.leaf) save();
};

// Plain words for the options that people change most.
const LABELS = { max_tokens: "Maximum tokens of the answer", temperature: "Randomness (temperature)", top_k: "Likeliest tokens to choose from (top k)",
  top_p: "Total probability of the likely tokens (top p)", min_p: "Minimum share of the most likely (min p)", repetition_penalty: "Penalty for repetition",
  stop: "Stop at this text", reasoning: "Thoughts", reasoning_budget: "Maximum tokens of a thought", schema: "JSON schema of the answer",
  regex: "Pattern of the answer (regex)", grammar: "Grammar of the answer", seed: "Seed (the same seed repeats the answer)",
  repetition_context_size: "Tokens that count as repeated", repetition_limit: "End an answer that repeats itself for so many tokens", presence_penalty: "Penalty for words already used", frequency_penalty: "Penalty for each use of a word",
  dry_multiplier: "Penalty for repeated phrases (DRY)", dry_base: "DRY: growth with the phrase's length", dry_allowed_length: "DRY: length that may repeat",
  dry_penalty_last_n: "DRY: tokens to look back", dry_sequence_breakers: "DRY: texts that end a phrase",
  xtc_probability: "How often the most likely tokens are left out (XTC)", xtc_threshold: "XTC: probability that counts as likely", logit_bias: "Favour or forbid tokens",
  stop_token_ids: "Stop at these tokens", prefill_step_size: "Prompt tokens computed at once", speculate: "Guess ahead (speculation)",
  logprobs: "Likeliest tokens to report", adapter: "LoRA adapter" };
const settingsError = $("settings-error");
let shownSettings = ""; // as the dialog was opened

const writeForm = () => JSON.stringify([...$("settings").querySelectorAll("input, select, textarea")].map((input) => input.value));

function showSettings() {
  $("system").value = conversation.system;
  settingsError.hidden = true;
  $("options").after(settingsError);
  const legend = $("options").querySelector("legend");
  $("options").replaceChildren(legend, ...Object.entries(table).map(([name, field]) => {
    const value = conversation.options[name];
    const input = field.choices
      ? make("select", {}, ...["", ...field.choices].map((choice) => make("option", { value: choice, textContent: choice || "(default)" })))
      : make("input", { type: "text", inputMode: field.isNumber ? "decimal" : "text", autocomplete: "off" });
    input.name = name;
    input.value = value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
    if (!field.choices) input.placeholder = name === "seed" && defaults.seed === null ? "drawn anew"
      : name === "max_tokens" && defaults.max_tokens >= 2 ** 31 ? "until the end" : write(defaults[name]);
    return make("label", {}, LABELS[name] ?? name.replaceAll("_", " "), input, make("small", { textContent: field.about }));
  }));
  shownSettings = writeForm();
  $("settings").showModal();
}

const write = (value) => value === null || value === undefined ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value);

const isList = (name) => ["stop", "dry_sequence_breakers"].includes(name);

// The options that the form holds; throws an Error that names the bad one.
function readSettings() {
  const options = {};
  for (const input of $("options").querySelectorAll("input, select")) {
    const field = table[input.name];
    const text = input.value.trim();
    const refuse = (reason) => Object.assign(new Error(`${input.name}: ${reason}`), { input });
    if (!text) continue;
    if (field.isNumber) {
      const value = Number(text);
      const fits = Number.isFinite(value) && (!field.isWhole || Number.isSafeInteger(value)) && value >= field.least && value <= field.most;
      if (!fits) throw refuse(`a ${field.isWhole ? "whole " : ""}number from ${field.least} to ${field.most}`);
      options[input.name] = value;
    } else if (field.choices || field.isText) {
      options[input.name] = text;
    } else if (isList(input.name) && !/^["[]/.test(text)) {
      options[input.name] = [text];
    } else {
      try {
        options[input.name] = JSON.parse(text);
      } catch {
        throw refuse(`JSON, such as ${isList(input.name) ? '["END"]' : '{"15043": -1}'}`);
      }
    }
  }
  return options;
}

function closeSettings(event) {
  for (const input of $("options").querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  try {
    conversation.options = readSettings();
  } catch (error) {
    event.preventDefault();
    settingsError.textContent = error.message;
    settingsError.hidden = false;
    error.input.after(settingsError); // at the field
    error.input.setAttribute("aria-invalid", true);
    error.input.setAttribute("aria-describedby", settingsError.id);
    error.input.focus();
    return;
  }
  conversation.system = $("system").value;
  showSwitch();
  if (conversation.leaf) save();
}

async function loadTable() {
  const document = await ask("/openapi.json");
  const fields = document.components.schemas.ChatRequest.properties;
  table = {};
  for (const name of Object.keys(defaults)) {
    const field = fields[name];
    if (!field?.aliases) continue;  // a field of the options table
    const kinds = [field, ...(field.anyOf || [])];
    const number = kinds.find((kind) => kind.type === "number" || kind.type === "integer");
    table[name] = { about: field.description, isNumber: !!number, isWhole: number?.type === "integer",
      least: number?.minimum ?? -Infinity, most: number?.maximum ?? Number.MAX_SAFE_INTEGER,
      isText: kinds.some((kind) => kind.type === "string"), choices: kinds.find((kind) => kind.enum)?.enum };
  }
}

async function loadModel() {
  for (;;) {
    try {
      const props = await ask("/props");
      defaults = props.default_generation_settings.params;
      defaults.repetition_limit ||= REPETITION_LIMIT; // the server's is off
      context = props.default_generation_settings.n_ctx;
      modelName = props.model_alias;
      modelPath = props.model_path;
      backendName = props.backend;
      examples = props.examples;
      hasSwitch = props.thinking_switch;
      hasAsides = props.has_asides;
      $("model").textContent = `${modelName} · ${props.backend} · ${props.dtype}`;
      await loadTable();
      showSwitch();
      say("");
      showMemory();
      if (!conversation.leaf) showWelcome();
      const last = conversation.nodes[conversation.leaf];
      if (last?.isCut && last.id === sessionStorage.getItem(ANSWERING)) run(last); // reloaded meanwhile
      return;
    } catch (error) {
      if (error.status === 401) {
        $("key-dialog").showModal();
        return;
      }
      say(error.status === 503 ? error.message : explain(error));
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

// Session files

function exportFile(content, ending) {
  const text = JSON.stringify(content, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const name = conversation.title.replace(/[^\p{L}\p{N} _-]/gu, "").trim() || "conversation";
  make("a", { href: url, download: `${name}${ending}` }).click();
  URL.revokeObjectURL(url);
}

async function importSession(file) {
  try {
    const text = await file.text();
    const imported = store.fromTree(text)
      ?? store.fromSession(await ask("/page/session", { text, name: file.name }), file.name.replace(/\.json$/, ""));
    stop();
    conversation = imported;
    say(`Imported ${Object.keys(imported.nodes).length} messages.`);
    save(); // may say that the storage is full
    show();
  } catch (error) {
    say(explain(error));
  }
}

// The frame

function openSidebar(is) {
  $("sidebar").classList.toggle("open", is);
  $("shade").hidden = !is;
  $("open-sidebar").setAttribute("aria-expanded", is);
  if (is) $("new").focus();
}

function showTheme() {
  const wanted = localStorage.getItem("mlx_llama theme");
  document.documentElement.dataset.theme = wanted || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function fitQuestion() {
  const area = $("question");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  const text = $("question").value;
  if (running || !text.trim()) return;
  $("question").value = "";
  fitQuestion();
  question(withFiles(text), conversation.leaf, text);
};
$("question").oninput = fitQuestion;
$("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
  if (event.key === "ArrowUp" && !event.target.value && !running) {
    const last = store.path(conversation).findLast((node) => node.role === "user");
    if (last) {
      event.preventDefault();
      edit(last);
    }
  }
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if ($("sidebar").classList.contains("open")) openSidebar(false);
    else stop();
  }
  if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) {
    event.preventDefault();
    begin();
  }
};
$("stop").onclick = stop;
$("new").onclick = begin;
$("open-sidebar").onclick = () => openSidebar(true);
$("close-sidebar").onclick = $("shade").onclick = () => openSidebar(false);
$("open-settings").onclick = showSettings;
$("settings-close").onclick = closeSettings;
$("settings").oncancel = (event) => {
  if (writeForm() !== shownSettings && !confirm("Discard the changes to the settings?")) event.preventDefault();
};
$("settings-reset").onclick = () => {
  for (const input of $("options").querySelectorAll("input, select")) input.value = "";
};
$("theme").onclick = () => {
  localStorage.setItem("mlx_llama theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  showTheme();
};
matchMedia("(prefers-color-scheme: dark)").onchange = showTheme;
$("export").onclick = () => exportFile(store.toSession(conversation, modelName), ".json");
$("export-all").onclick = () => exportFile(store.toTree(conversation), ".branches.json");
$("search").oninput = showList;
$("attach").onclick = () => $("attach-file").click();
$("attach-file").onchange = async (event) => {
  const files = [...event.target.files];
  event.target.value = "";
  $("question").focus();
  await attach(files);
};
// Files that are dropped on the page or pasted into the question.
document.ondragover = (event) => event.dataTransfer.types.includes("Files") && event.preventDefault();
document.ondrop = $("question").onpaste = (event) => {
  const files = [...(event.dataTransfer ?? event.clipboardData).files];
  if (!files.length || event.clipboardData?.getData("text/plain")) return; // a copied table is a picture, too
  event.preventDefault();
  attach(files);
};
$("import").onclick = () => $("import-file").click();
$("import-file").onchange = (event) => {
  if (event.target.files[0]) importSession(event.target.files[0]);
  event.target.value = "";
};
$("key-dialog").onclose = () => {
  setKey($("key").value.trim());
  loadModel();
};
window.addEventListener("pagehide", () => {
  isLeaving = true;
  if (running) store.save(conversation);
});
window.addEventListener("pageshow", (event) => event.persisted && location.reload());
window.addEventListener("storage", (event) => {
  if (event.key?.startsWith("mlx_llama conversations")) showList();
});

showTheme();
conversation = store.load(sessionStorage.getItem("mlx_llama open")) || store.load(store.list()[0]?.id) || conversation;
show();
loadModel();
