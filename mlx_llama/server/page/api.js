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

async function send(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = body === undefined ? { headers, signal } : {
    method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
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

// The values of a stream's data lines, until [DONE]. onDropped: called with the number of messages that no longer fitted.
export async function* stream(path, body, signal, onDropped) {
  const response = await send(path, body, signal);
  onDropped(Number(/truncation: (\d+) messages/.exec(response.headers.get("X-Mlx-Llama-Noted"))?.[1] ?? 0));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await next(reader);
      if (done) break;
      rest += value;
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const found = JSON.parse(data);
        if (found.error) throw new ApiError(found.error.message, 500);
        yield found;
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
