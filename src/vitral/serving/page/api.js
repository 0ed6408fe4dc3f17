// Requests to the server; an answer that is not 2xx becomes an Error with the server's own sentence.

let key = sessionStorage.getItem("vitral-key") || "";
export const hasKey = () => Boolean(key);

// Ask the person for a key; false if there is none.
export function askForKey() {
  const dialog = document.getElementById("keyDialog"), input = document.getElementById("keyInput");
  input.value = "";
  dialog.showModal();
  return new Promise(resolve => dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "use" || !input.value) return resolve(false);
    key = input.value;
    sessionStorage.setItem("vitral-key", key);
    resolve(true);
  }, { once: true }));
}

async function ask(path, options) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached; is it still running?");
  }
  if (response.status === 401 && await askForKey()) return ask(path, options);
  const document = await response.json().catch(() => null);
  if (!response.ok) throw new Error(document?.error?.message ?? `The server answered with ${response.status}.`);
  return document;
}

export const get = path => ask(path, {});

// A form with the item, a picture or a text, and fields; those that are null are left out.
export function post(path, item, fields, signal) {
  const form = new FormData();
  if (typeof item === "string") form.append("text", item); else form.append("image", item, "picture");
  for (const [name, value] of Object.entries(fields)) if (value !== null && value !== "") form.append(name, value);
  return ask(path, { method: "POST", body: form, signal });
}
