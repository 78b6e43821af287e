// The values of the run, and how numbers are written.

export const DASH = "–";

/** Decompress and read the values in the page. */
export async function load() {
  const text = document.getElementById("values").textContent.trim();
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** A number with at most `digits` decimals; a dash if there is none. */
export function number(value, digits = 3) {
  if (value === null || value === undefined) return DASH;
  if (!Number.isFinite(value)) return String(value); // "nan" and "inf" come as text
  if (value !== 0 && Math.abs(value) < 10 ** -digits) return value.toPrecision(2);
  return Number(value.toFixed(digits)).toLocaleString("en-US", { maximumFractionDigits: digits });
}

/** "1 group", "2 groups". */
export function many(count, what) {
  return `${number(count)} ${what}${count === 1 ? "" : "s"}`;
}
