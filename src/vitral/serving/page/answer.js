// Answers of every task: in words and bars beside the picture, and as boxes or masks on it.

import { digits, rgb } from "/page/maps.js";

export function element(tag, options = {}, ...children) {
  const made = Object.assign(document.createElement(tag), options);
  made.append(...children);
  return made;
}
const MOST_BARS = 12, percent = p => (100 * p).toFixed(p > 0.9995 || p < 0.0005 ? 2 : 1) + " %";

function bars(rows) {
  return element("ul", { className: "bars" }, ...rows.map(({ name, value, share, colour }) => {
    const fill = element("div", { className: colour === null ? "fill plain" : "fill" }), label = element("span", {}, name);
    fill.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
    if (colour) {
      fill.style.background = rgb(colour);
      const swatch = element("span", { className: "swatch" });
      swatch.style.background = rgb(colour);
      label.prepend(swatch);
    }
    return element("li", {}, element("div", { className: "name" }, label, element("span", {}, value)),
      element("div", { className: "track", ariaHidden: "true" }, fill));
  }));
}

function barsOrSome(rows) {
  const rest = rows.slice(MOST_BARS);
  return [bars(rows.slice(0, MOST_BARS)), ...rest.length ? [element("details", {}, element("summary", { className: "soft" }, `${rest.length} more`), bars(rest))] : []];
}

// The rows of an answer; `colour` is null where what others have a colour for has none. Also what is written on a shared picture.
export function rowsOf(answer, labels, colours) {
  const of = name => colours.classes[Math.max(0, labels.indexOf(name)) % 256];
  switch (answer.task) {
    case "classify": return answer.predictions.map(p => ({ name: p.label, value: percent(p.probability), share: p.probability }));
    case "multilabel": return Object.entries(answer.probabilities).sort((a, b) => b[1] - a[1]).slice(0, 10)
      .map(([name, p]) => ({ name: answer.labels.includes(name) ? `${name} ✓` : name, value: percent(p), share: p }));
    case "detect": return answer.objects.map(o => ({ name: o.label, value: percent(o.score), share: o.score, colour: of(o.label) }));
    case "segment": return [...answer.classes].sort((a, b) => b.share - a.share).map(c => {
      const number = labels.indexOf(c.label);
      return { name: c.label, value: percent(c.share), share: c.share, colour: number > 0 ? colours.classes[(number - 1) % 256] : null };
    });
    case "regress": return Object.entries(answer.values).map(([name, v]) => ({ name, share: 0,
      value: digits(v) + (answer.deviations ? ` ± ${digits(answer.deviations[name])}` : "") }));
    case "tag": return answer.words.map(w => ({ name: w.word, value: `${w.tag} ${percent(w.probability)}`, share: w.probability }));
    default: return answer.texts.map(t => ({ name: t.text, value: "", share: 0 }));
  }
}

export function show(answer, labels, colours) {
  const rows = rowsOf(answer, labels, colours), shown = [];
  if (answer.task === "regress") {
    for (const row of rows) shown.push(element("p", { className: "number" }, row.value), element("p", { className: "soft" }, row.name));
  } else if (answer.task === "tag") {
    shown.push(element("div", { className: "words" }, ...answer.words.map(w => element("span", { title: percent(w.probability) }, w.word, element("b", {}, w.tag)))));
  } else if (answer.texts) {
    for (const row of rows) shown.push(element("p", { className: "written" }, row.name || "(nothing)"));
  } else if (!rows.length) shown.push(element("p", {}, "Nothing was found."));
  else shown.push(...barsOrSome(rows));
  if (answer.task === "multilabel" && !answer.labels.length) shown.unshift(element("p", { className: "soft" }, "No label is above its threshold."));
  if (answer.note) shown.push(element("p", { className: "soft" }, answer.note));
  return shown;
}

// Boxes and masks, in the picture's own pixels, drawn at `scale`.
export function drawOn(pen, answer, labels, colours, scale) {
  if (answer?.task === "detect") drawBoxes(pen, answer, labels, colours, scale);
  if (answer?.task === "segment") drawMask(pen, answer, labels, colours, scale);
}

function drawBoxes(pen, answer, labels, colours, scale) {
  const width = pen.canvas.width, size = Math.max(12, Math.round(width / 46));
  pen.font = `600 ${size}px system-ui, sans-serif`;
  pen.textBaseline = "top";
  for (const { label, score, box } of [...answer.objects].reverse()) {  // the best is drawn last
    const [x0, y0, x1, y1] = box.map(v => v * scale), ink = colours.classes[Math.max(0, labels.indexOf(label)) % 256];
    pen.lineWidth = Math.max(2, width / 280);
    pen.strokeStyle = pen.fillStyle = rgb(ink);
    pen.strokeRect(x0, y0, x1 - x0, y1 - y0);
    const text = `${label} ${Math.round(100 * score)} %`, w = pen.measureText(text).width + 8, h = size + 6;
    const x = Math.min(Math.max(0, x0), width - w), y = y0 >= h ? y0 - h : Math.min(y1, pen.canvas.height - h);
    pen.fillRect(x, y, w, h);
    pen.fillStyle = ink[0] + ink[1] + ink[2] > 330 ? "#000" : "#fff";
    pen.fillText(text, x + 4, y + 4);
  }
}

function drawMask(pen, answer, labels, colours, scale) {
  const [H, W] = answer.size, numbers = new Int16Array(H * W);
  for (const { label, rle } of answer.classes) {
    const number = labels.indexOf(label);
    let at = 0, on = false;
    for (const count of rle.counts) {  // zeros and ones in turn, down the columns
      if (on) for (let i = at; i < at + count; i++) numbers[(i % H) * W + Math.floor(i / H)] = number;
      at += count;
      on = !on;
    }
  }
  const layer = new OffscreenCanvas(W, H), brush = layer.getContext("2d"), pixels = brush.createImageData(W, H);
  const across = i => i % W && numbers[i - 1] !== numbers[i], down = i => i >= W && numbers[i - W] !== numbers[i], thin = scale > 2;
  for (let i = 0; i < H * W; i++) {
    const n = numbers[i];
    if (!thin && (across(i) || down(i))) pixels.data.set([255, 255, 255, 255], 4 * i);
    else if (n > 0) pixels.data.set([...colours.classes[(n - 1) % 256], 128], 4 * i);
  }
  brush.putImageData(pixels, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(layer, 0, 0, pen.canvas.width, pen.canvas.height);
  pen.fillStyle = "#fff";
  if (thin) for (let i = 0; i < H * W; i++) {  // lines between large pixels
    const x = (i % W) * scale, y = Math.floor(i / W) * scale;
    if (across(i)) pen.fillRect(x - 1, y - 1, 2, scale + 2);
    if (down(i)) pen.fillRect(x - 1, y - 1, scale + 2, 2);
  }
}
