// The OpenAPI document as a page: each address, what it takes, and a command to try it.

const element = (tag, text = "", ...children) => {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...children);
  return made;
};
const kindOf = s => s.enum?.join(" | ") ?? s.const ?? s.anyOf?.map(kindOf).join(" | ") ?? (s.format ? `${s.type} (${s.format})` : s.type ?? "");
const key = sessionStorage.getItem("vitral-key") ? '-H "Authorization: Bearer KEY" ' : "";

function table(form, json) {
  const made = document.createElement("table");
  made.append(element("tr", "", element("th", "field"), element("th", "type"), element("th", "what it is")));
  for (const [name, s] of Object.entries(form.properties ?? {})) {
    const initial = s.default === undefined || s.default === null || s.default === "" ? "" : ` Default: ${s.default}.`;
    made.append(element("tr", "", element("td", "", element("code", name)), element("td", kindOf(s)), element("td", (s.description ?? json.properties[name].description ?? "") + initial)));
  }
  return made;
}

function section(path, method, about) {
  const made = document.createElement("section"), head = document.createElement("h2"), verb = element("span", method.toUpperCase());
  made.className = "card";
  verb.className = "verb";
  head.append(verb, path);
  made.append(head, element("p", about.description ?? ""));
  const content = about.requestBody?.content, form = content?.["multipart/form-data"]?.schema;
  if (form) made.append(table(form, content["application/json"].schema));
  made.append(element("pre", `curl ${key}${form ? "-F image=@picture.jpg " : ""}${location.origin}${path}`));
  return made;
}

const spec = await (await fetch("/openapi.json")).json();
for (const [path, methods] of Object.entries(spec.paths)) {
  for (const [method, about] of Object.entries(methods)) document.getElementById("docs").append(section(path, method, about));
}
