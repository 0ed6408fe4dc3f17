// The explorer of what a model looks at: attention of every block and head, patch by patch, and the maps of other methods.

import { painted, percent, digits, rgb, scaleOf, unpackRows, weights } from "/page/maps.js";

export const NAMES = { picture: "Picture", attention: "Attention", rollout: "Rollout", relevance: "Relevance", gradcam: "Grad-CAM", writing: "Writing", tokens: "Tokens" };
// What a newcomer is told of each way to explain.
export const MEANINGS = {
  rollout: "The attention of all blocks, followed one through the other: which patches the answer can have drawn on.",
  relevance: "Attention times how much the class's score would change with it, through all blocks: what speaks for the class.",
  gradcam: "The last features, weighted by how much each raises the class's score: what speaks for the class.",
  writing: "Where the model looked when it wrote each token.",
  tokens: "The features of the patches, brought to three numbers that tell most of them apart, as red, green and blue.",
};
export const BY_CLASS = ["relevance", "gradcam"];

export class Look {
  // The attention of a ViT has every row here; that of windows, or of many patches, is one block's maps and asked for anew.
  // `query` is the patch that looks, or -1 for [CLS] or all patches; `at` the one that is pointed at; `head` -1 for their mean.
  // `layer` and `query` are what is wanted; `told` what the maps are of, until the server has said more.
  static async from(explained, { blocks, cls }) {
    const look = new Look(), [rows, columns] = explained.grid, packed = explained.rows;
    Object.assign(look, { method: explained.method, about: explained.about, part: explained.part, rows, columns, packed, cls,
      titles: explained.titles, maps: explained.maps, map: 0, at: -1, layers: packed?.layers ?? blocks, target: explained.class,
      timing: explained.timing });
    look.picture = new Image();
    look.picture.src = `data:image/png;base64,${explained.image}`;
    await look.picture.decode();
    look.attends = explained.method === "attention";
    look.live = look.attends && Boolean(packed);
    if (look.live) {
      look.weights = await unpackRows(packed, rows * columns);
      look.layer = packed.layers - 1;
      look.head = packed.heads.length === 1 ? 0 : -1;
      look.query = look.cls ? -1 : look.middle;
    } else {
      look.told = { layer: explained.layer, query: explained.patch ? look.cell(...explained.patch) : -1 };
      look.settle();
    }
    return look;
  }
  // The patch at a pixel of the picture, and the pixel in the middle of a patch.
  cell(x, y) { return Math.floor(y * this.rows / this.picture.height) * this.columns + Math.floor(x * this.columns / this.picture.width); }
  pixel(i) {
    const middle = (n, count, size) => Math.floor((n + 0.5) * size / count);
    return [middle(i % this.columns, this.columns, this.picture.width), middle(Math.floor(i / this.columns), this.rows, this.picture.height)];
  }
  get middle() { return Math.floor(this.rows / 2) * this.columns + Math.floor(this.columns / 2); }
  place(i) { return `row ${Math.floor(i / this.columns) + 1}, column ${i % this.columns + 1}`; }
  get frame() { return this.live || (this.attends && this.at < 0) ? this.query : this.at; }
  get asked() { return this.attends && this.query !== this.frame ? this.query : -1; }
  get shown() { return this.live ? this : this.told; }
  settle() { Object.assign(this, this.told); }

  choose(patch) {
    this.at = patch;
    if (this.live) this.query = patch;
  }

  // What is shown now: the colour of each patch, the ends of the scale, and a sentence.
  view(table) {
    if (this.method === "tokens") {
      const [r, g, b] = this.maps.map(map => map.flat());
      return { cells: r.map((v, i) => [v, g[i], b[i]].map(c => Math.round(255 * c))), say: "Patches of like colour are alike to the model." };
    }
    const values = this.live ? this.row() : this.maps[this.map].flat();
    const s = scaleOf(values), best = values.indexOf(s.high), tell = this.attends || this.method === "writing" ? percent : digits;
    const cells = painted(values, s.top, table), ends = [s.low < 0 ? tell(-s.top) : "0", tell(s.top)];
    const here = this.at >= 0 ? this.at : best;
    if (this.attends) {
      const { layer, query } = this.shown, whose = query < 0 && !this.cls ? "their" : "its";
      const all = this.cls ? "[CLS] looks" : "All patches together look", who = query < 0 ? all : `The patch in ${this.place(query)} looks`;
      const more = this.live || here === best ? "" : ` ${percent(values[here])} go to ${this.place(here)}.`;
      const even = s.low > 0.6 * s.high ? " It is spread almost evenly." : "";
      return { cells, ends, signed: false, say: `${who} most at ${this.place(best)}: ${percent(s.high)} of ${whose} attention in block ${layer}, ${this.headName}.${even}${more}` };
    }
    return { cells, ends, signed: s.low < 0, say: `${this.titles[this.map]}: ${tell(values[here])} in ${this.place(here)}` +
      (here === best ? ", the most." : `; the most is ${tell(values[best])} in ${this.place(best)}.`) };
  }
  row() {
    const heads = this.head < 0 ? [...Array(this.weights.kept).keys()] : [this.head];
    return Array.from(weights(this.weights, this.layer, heads, this.query < 0 ? 0 : this.query + (this.cls ? 1 : 0)));
  }
  get headName() {
    if (!this.live) return this.titles[this.map];
    return this.head < 0 ? "mean of heads" : `head ${this.packed.heads[this.head] ?? this.head}`;
  }

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
