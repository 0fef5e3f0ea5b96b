// Requests to this server, and to no other.

let key = sessionStorage.getItem("mlx_llama key") || "";

export class ApiError extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function setKey(value) {
  key = value;
  sessionStorage.setItem("mlx_llama key", value);
}

async function send(path, body, signal, method = body === undefined ? "GET" : "POST") {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = body === undefined ? { method, headers, signal } : {
    method, headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?", 0);
  }
  if (!response.ok) throw await describe(response);
  return response;
}

async function describe(response) {
  let text = `The server answered ${response.status}.`;
  try {
    const body = await response.json();
    text = body.errors?.length ? body.errors.map((fault) => fault.message).join("\n") : body.error.message;
  } catch { /* not JSON: the status says enough */ }
  return new ApiError(text, response.status, response.headers.get("Retry-After"));
}

export const ask = async (path, body, signal) => (await send(path, body, signal)).json();

const CUT = "The connection ended before the answer did. Is the server still running?";

// Start an answer that outlives this page for a minute. Returns its job and the number of messages that no longer fitted.
export async function startJob(body, signal) {
  const response = await send("/v1/jobs", { ...body, abandon_seconds: 60 }, signal);
  const dropped = Number(/truncation: (\d+) messages/.exec(response.headers.get("X-Mlx-Llama-Noted"))?.[1] ?? 0);
  return { job: (await response.json()).job_id, dropped };
}

export const cancelJob = (job) => send(`/v1/jobs/${job}`, undefined, undefined, "DELETE");

// The events of a job after number `seen`, to its end.
export async function* follow(job, seen, signal) {
  const response = await send(`/v1/jobs/${job}/stream?last_event_id=${seen}`, undefined, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name, id;
  try {
    for (;;) {
      const { value, done } = await next(reader);
      if (done) break;
      rest += value;
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const [, field, text] = /^(\w+): (.*)$/s.exec(line) ?? [];
        if (field === "event") name = text;
        if (field === "id") id = Number(text);
        if (field !== "data") continue;
        if (text === "[DONE]") return;
        yield { ...JSON.parse(text), name, id };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ApiError(CUT, 0);
}

async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(CUT, 0); // the server died
  }
}
