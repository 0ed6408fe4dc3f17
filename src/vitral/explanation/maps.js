// What pages show of maps over patches: numbers, colours by the rule of colours.py, and attention rows as page.py packs them.

export const digits = v => v !== 0 && (Math.abs(v) < 1e-4 || Math.abs(v) >= 1e6) ?
  v.toExponential(1).replace("+", "") : String(+v.toPrecision(3));
export const percent = v => digits(100 * v) + " %";
export const rgb = c => `rgb(${c.join(",")})`;

// From zero to the largest; a few outliers are cut off unless they hold half of everything.
export function scaleOf(values) {
  const sizes = Float64Array.from(values, Math.abs).sort().reverse(), add = (a, b) => a + b;
  const few = Math.floor(sizes.length / 200 + 0.5);
  const cut = sizes[0] > 2 * sizes[few] && sizes.slice(0, few).reduce(add, 0) < 0.5 * sizes.reduce(add, 0);
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  return { low, high, top: (cut ? sizes[few] : sizes[0]) || 1, cut: cut ? few : 0 };
}

// The colour of each value, from a table that goes from the most below zero to the most above.
export function painted(values, top, table) {
  const zero = table.length / 2;
  return Array.from(values, v => {
    const step = Math.round(Math.min(1, Math.abs(v) / top) * (zero - 1));
    return table[v < 0 ? zero - 1 - step : zero + step];
  });
}

// Where one query looks in a block: the mean over some heads, one weight a patch.
export function weights(rows, layer, heads, query) {
  const sum = new Float64Array(rows.patches);
  for (const h of heads) {
    const row = (layer * rows.kept + h) * rows.queries + query, share = rows.largest[row] / 255 / heads.length;
    for (let i = 0; i < rows.patches; i++) sum[i] += rows.shares[row * rows.patches + i] * share;
  }
  return sum;
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

// The rows of page.py, ready for `weights`.
export async function unpackRows(packed, patches) {
  return { patches, queries: packed.queries, kept: Math.max(1, packed.heads.length),
    largest: new Float32Array(await unpacked(packed.largest)), shares: new Uint8Array(await unpacked(packed.shares)) };
}
