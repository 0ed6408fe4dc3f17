// The OpenAPI document as a page: each address, what it takes and answers with, and a command to try it.

const element = (tag, text = "", ...children) => {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...children);
  return made;
};
const spec = await (await fetch("/openapi.json")).json();
const key = sessionStorage.getItem("vitral-key") ? '-H "Authorization: Bearer KEY" ' : "";
const named = s => s?.$ref ? spec.components.schemas[s.$ref.split("/").pop()] : s;

function kindOf(given) {
  const s = named(given), either = s.anyOf ?? s.oneOf;
  if (s.enum) return s.enum.join(" | ");
  if (s.const) return s.const;
  if (either) return either.map(kindOf).join(" | ");
  if (s.type === "array") return `list of ${kindOf(s.items ?? {})}`;
  if (s.additionalProperties) return `name: ${kindOf(s.additionalProperties)}`;
  if (s.properties) return `{${Object.keys(s.properties).join(", ")}}`;
  return s.format ? `${s.type} (${s.format})` : s.type ?? "";
}

// Fields by name; `others` may know more of them.
function table(fields, others = {}) {
  const made = document.createElement("table");
  made.append(element("tr", "", ...["field", "type", "what it is"].map(title => element("th", title))));
  for (const [name, s] of Object.entries(fields)) {
    const initial = s.default === undefined || s.default === null || s.default === "" ? "" : ` Default: ${s.default}.`;
    const about = s.description ?? others[name]?.description ?? named(s).description ?? "";
    made.append(element("tr", "", element("td", "", element("code", name)), element("td", kindOf(s)), element("td", about + initial)));
  }
  return made;
}

// What is answered; where that depends on the task, what all answers have and then what each of them has.
function answers(given) {
  const whole = named(given), kinds = (whole.oneOf ?? [given]).map(named);
  const inAll = name => kinds.every(kind => kind.properties[name]) && !(kinds.length > 1 && kinds.some(kind => kind.properties[name].const));
  const fields = (kind, all) => Object.fromEntries(Object.entries(kind.properties).filter(([name]) => inAll(name) === all));
  const made = document.createElement("details");
  made.append(element("summary", "Answers with"), element("p", whole.description ?? ""), table(fields(kinds[0], true)));
  if (kinds.length > 1) for (const kind of kinds) made.append(element("p", kind.description ?? ""), table(fields(kind, false)));
  return made;
}

function section(path, method, about) {
  const made = document.createElement("section"), head = document.createElement("h2"), verb = element("span", method.toUpperCase());
  made.className = "card";
  verb.className = "verb";
  head.append(verb, path);
  made.append(head, element("p", about.description ?? ""));
  const content = about.requestBody?.content, form = content?.["multipart/form-data"]?.schema;
  if (form) made.append(table(form.properties, content["application/json"].schema.properties));
  made.append(element("pre", `curl ${key}${form ? "-F image=@picture.jpg " : ""}${location.origin}${path}`));
  const answered = about.responses[200].content?.["application/json"]?.schema;
  if (answered) made.append(answers(answered));
  return made;
}

for (const [path, methods] of Object.entries(spec.paths)) {
  for (const [method, about] of Object.entries(methods)) document.getElementById("docs").append(section(path, method, about));
}
