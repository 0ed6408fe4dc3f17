// Requests to the server; an answer that is not 2xx becomes an Error with the server's own sentence.

let key = sessionStorage.getItem("vitral-key") || "", needed = Boolean(key);
export const needsKey = () => needed;

// Ask the person for a key; false if there is none.
export function askForKey(title) {
  const dialog = document.getElementById("keyDialog"), input = document.getElementById("keyInput");
  document.getElementById("keyTitle").textContent = title;
  input.value = dialog.returnValue = "";
  dialog.showModal();
  return new Promise(resolve => dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "use" || !input.value) return resolve(false);
    key = input.value;
    sessionStorage.setItem("vitral-key", key);
    resolve(true);
  }, { once: true }));
}

export async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached; is it still running?");
  }
}

async function ask(path, options) {
  const response = await reach(path, { ...options, headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (response.status === 401) {
    needed = true;
    if (await askForKey(key ? "This server does not know the key" : "This server asks for a key")) return ask(path, options);
  }
  const answer = await response.json().catch(() => null);
  options.signal?.throwIfAborted();
  const wrong = response.ok ? "The server's answer was cut off." : `The server answered with ${response.status}.`;
  if (!response.ok || !answer) throw Object.assign(new Error(answer?.error?.message ?? wrong), { status: response.status });
  return answer;
}

export const get = path => ask(path, {});

// A form with the item, a picture or a text, and fields; those that are null are left out.
export function post(path, item, fields, signal) {
  const form = new FormData();
  if (typeof item === "string") form.append("text", item); else form.append("image", item, "picture");
  for (const [name, value] of Object.entries(fields)) if (value !== null && value !== "") form.append(name, value);
  return ask(path, { method: "POST", body: form, signal });
}
