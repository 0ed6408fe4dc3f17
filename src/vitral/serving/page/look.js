// The explorer of what a model looks at: attention of every block and head, patch by patch, and the maps of other methods.

import { painted, percent, digits, rgb, scaleOf, unpackRows, weights } from "/page/maps.js";

export const NAMES = { picture: "Picture", attention: "Attention", rollout: "Rollout", relevance: "Relevance", gradcam: "Grad-CAM", tokens: "Tokens" };

export class Look {
  // `rows` are there for attention, `maps` for the others; `query` is a patch, or -1 for [CLS]; `head` -1 for their mean.
  static async from(explained) {
    const look = new Look(), [rows, columns] = explained.grid;
    Object.assign(look, { method: explained.method, about: explained.about, part: explained.part, rows, columns,
      titles: explained.titles, maps: explained.maps, map: 0, at: -1 });
    look.picture = new Image();
    look.picture.src = `data:image/png;base64,${explained.image}`;
    await look.picture.decode();
    look.packed = explained.rows;
    look.weights = await unpackRows(explained.rows, rows * columns);
    look.cls = explained.rows.queries > rows * columns;
    look.layer = explained.rows.layers - 1;
    look.head = explained.rows.heads.length === 1 ? 0 : -1;
    look.query = look.cls ? -1 : look.middle;
    return look;
  }
  get middle() { return Math.floor(this.rows / 2) * this.columns + Math.floor(this.columns / 2); }
  place(i) { return `row ${Math.floor(i / this.columns) + 1}, column ${i % this.columns + 1}`; }
  get frame() { return this.method === "attention" ? this.query : this.at; }

  choose(patch) {
    this.at = patch;
    if (this.method === "attention") this.query = patch;
  }

  // What is shown now: the colour of each patch, the ends of the scale, and a sentence.
  view(table) {
    if (this.method === "tokens") {
      const [r, g, b] = this.maps.map(map => map.flat());
      return { cells: r.map((v, i) => [v, g[i], b[i]].map(c => Math.round(255 * c))), say: "Patches of like colour are alike to the model." };
    }
    const heads = this.head < 0 ? [...Array(this.weights.kept).keys()] : [this.head];
    const attention = this.method === "attention";
    const values = attention ? Array.from(weights(this.weights, this.layer, heads, this.query < 0 ? 0 : this.query + (this.cls ? 1 : 0))) : this.maps[this.map].flat();
    const s = scaleOf(values), best = values.indexOf(s.high), tell = attention ? percent : digits;
    const cells = painted(values, s.top, table), ends = [s.low < 0 ? tell(-s.top) : "0", tell(s.top)];
    if (attention) {
      const who = this.query < 0 ? "[CLS]" : `The patch in ${this.place(this.query)}`;
      return { cells, ends, signed: false, say: `${who} looks most at ${this.place(best)}: ${percent(s.high)} of its attention in block ${this.layer}, ${this.headName}.` };
    }
    const here = this.at >= 0 ? this.at : best;
    return { cells, ends, signed: s.low < 0, say: `${this.titles[this.map]}: ${digits(values[here])} in ${this.place(here)}` +
      (here === best ? ", the most." : `; the most is ${digits(values[best])} in ${this.place(best)}.`) };
  }
  get headName() { return this.head < 0 ? "mean of heads" : `head ${this.packed.heads[this.head] ?? this.head}`; }

  draw(pen, strength, table) {
    const { width, height } = pen.canvas, shown = this.view(table), w = width / this.columns, h = height / this.rows;
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.picture, 0, 0, width, height);
    pen.globalAlpha = strength;
    shown.cells.forEach((cell, i) => {
      pen.fillStyle = rgb(cell);
      const x = Math.round((i % this.columns) * w), y = Math.round(Math.floor(i / this.columns) * h);
      pen.fillRect(x, y, Math.round((i % this.columns + 1) * w) - x, Math.round((Math.floor(i / this.columns) + 1) * h) - y);
    });
    pen.globalAlpha = 1;
    return shown;
  }
}
