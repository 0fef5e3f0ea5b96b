// Conversations in localStorage: each a tree of messages, of which one path is shown.

const INDEX = "mlx_llama conversations";
const name = (id) => `mlx_llama conversation ${id}`;
const fresh = () => crypto.getRandomValues(new Uint32Array(3)).join("-");

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function list() {
  return read(INDEX, []);
}

// Entries whose title or messages contain a text.
export function search(text) {
  const wanted = text.trim().toLowerCase();
  const has = (part) => part.toLowerCase().includes(wanted);
  return list().filter(({ id, title }) => !wanted || has(title) || Object.values(load(id)?.nodes ?? {}).some((node) => has(node.text)));
}

export function load(id) {
  const found = read(name(id), null);
  return found && found.nodes ? found : null;
}

// Returns false when the browser's storage is full.
export function save(conversation) {
  try {
    localStorage.setItem(name(conversation.id), JSON.stringify(conversation));
    const others = list().filter((entry) => entry.id !== conversation.id);
    localStorage.setItem(INDEX, JSON.stringify([{ id: conversation.id, title: conversation.title }, ...others]));
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  localStorage.removeItem(name(id));
  localStorage.setItem(INDEX, JSON.stringify(list().filter((entry) => entry.id !== id)));
}

export function create() {
  return { id: fresh(), title: "New conversation", system: "", options: {}, nodes: {}, leaf: null };
}

export function add(conversation, parent, role, text) {
  const node = { id: fresh(), parent, role, text };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  return node;
}

export function path(conversation, leaf = conversation.leaf) {
  const nodes = [];
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) nodes.unshift(node);
  return nodes;
}

// Nodes of a path for the model. A question whose answer failed is left out with it.
export function said(conversation, leaf = conversation.leaf) {
  const nodes = [];
  for (const node of path(conversation, leaf)) {
    if (node.role === "assistant" && !node.text) nodes.pop();
    else nodes.push(node);
  }
  return nodes;
}

export const toMessage = ({ role, text, thought }) => ({ role, content: text, ...(thought ? { reasoning_content: thought } : {}) });

export const siblings = (conversation, node) =>
  Object.values(conversation.nodes).filter((other) => other.parent === node.parent && other.role === node.role);

// Show the branch of `node` down to its newest end.
export function choose(conversation, node) {
  let leaf = node;
  for (;;) {
    const below = Object.values(conversation.nodes).filter((other) => other.parent === leaf.id);
    if (!below.length) break;
    leaf = below[below.length - 1];
  }
  conversation.leaf = leaf.id;
}

// The REPL's session file of the shown path: questions and answers in turn.
export function toSession(conversation, model) {
  const nodes = said(conversation);
  if (nodes.length % 2) nodes.pop();
  return { format: "mlx_llama session", version: 1, model, system: conversation.system || null, options: conversation.options,
    messages: nodes.map(toMessage), dropped: 0, is_cut: nodes.at(-1)?.isCut === true };
}

// A file of this page, with all branches.
const KIND = "mlx_llama conversation";

export const toTree = ({ title, system, options, nodes, leaf }) => ({ format: KIND, version: 1, title, system, options, nodes: Object.values(nodes), leaf });

// Returns null for a text that is no such file; throws an Error if it is a broken one.
export function fromTree(text) {
  let saved;
  try {
    saved = JSON.parse(text);
  } catch {
    return null;
  }
  if (saved?.format !== KIND) return null;
  const { title, system, options, nodes, leaf } = saved;
  const ids = new Set();
  const isText = (value) => typeof value === "string";
  // A parent stands before its children, so that there is no circle.
  const isNode = (node) => {
    const fits = isText(node?.id) && !ids.has(node.id) && ["user", "assistant"].includes(node.role) && isText(node.text)
      && (node.parent === null || ids.has(node.parent)) && (node.thought === undefined || isText(node.thought));
    return fits && ids.add(node.id);
  };
  const fits = saved.version === 1 && isText(title) && isText(system) && Array.isArray(nodes) && nodes.every(isNode)
    && (leaf === null || ids.has(leaf)) && typeof options === "object" && options && !Array.isArray(options);
  if (!fits) throw new Error("This conversation file is damaged.");
  const kept = nodes.map(({ id, parent, role, text, thought, note, isCut }) => [id, { id, parent, role, text, thought,
    note: isText(note) ? note : undefined, isCut: isCut === true }]);
  return { ...create(), title, system, options, nodes: Object.fromEntries(kept), leaf };
}

export function fromSession(saved, title) {
  const conversation = create();
  conversation.title = title;
  conversation.system = saved.system || "";
  conversation.options = saved.options;
  let parent = null;
  for (const message of saved.messages) {
    const node = add(conversation, parent, message.role, message.content);
    if (message.reasoning_content) node.thought = message.reasoning_content;
    node.isCut = saved.is_cut && message === saved.messages.at(-1);
    parent = node.id;
  }
  return conversation;
}
