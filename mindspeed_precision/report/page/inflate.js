// Packed data: base64 of a zlib stream (RFC 1950), unpacked by the browser, or here where it cannot.
function bytesOf(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let n = 0; n < raw.length; n++) bytes[n] = raw.charCodeAt(n);
  return bytes;
}

async function unpack(text) {
  const bytes = bytesOf(text);
  if (typeof DecompressionStream === "undefined") return inflate(bytes);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function unpackJson(text) {
  return JSON.parse(new TextDecoder().decode(await unpack(text)));
}

// Canonical Huffman codes as counts by length and symbols in order (RFC 1951, section 3.2.2).
function huffman(lengths) {
  const counts = new Uint16Array(16), offsets = new Uint16Array(16), symbols = new Uint16Array(lengths.length);
  for (const length of lengths) counts[length]++;
  counts[0] = 0;
  for (let n = 1; n < 16; n++) offsets[n] = offsets[n - 1] + counts[n - 1];
  lengths.forEach((length, symbol) => {
    if (length) symbols[offsets[length]++] = symbol;
  });
  return { counts, symbols };
}

function inflate(bytes) {
  let at = 2, held = 0, have = 0, size = 0;
  let out = new Uint8Array(Math.max(bytes.length * 6, 1024));
  const bits = (count) => {
    while (have < count) {
      held |= bytes[at++] << have;
      have += 8;
    }
    const value = held & ((1 << count) - 1);
    held >>>= count;
    have -= count;
    return value;
  };
  const symbol = ({ counts, symbols }) => {
    let code = 0, first = 0, index = 0;
    for (let length = 1; length < 16; length++) {
      code |= bits(1);
      if (code - counts[length] < first) return symbols[index + code - first];
      index += counts[length];
      first = (first + counts[length]) << 1;
      code <<= 1;
    }
    throw new Error("packed data are damaged");
  };
  const grow = (more) => {
    if (size + more <= out.length) return;
    const larger = new Uint8Array(Math.max(out.length * 2, size + more));
    larger.set(out);
    out = larger;
  };
  const fixed = [
    huffman(Array.from({ length: 288 }, (_, n) => (n < 144 ? 8 : n < 256 ? 9 : n < 280 ? 7 : 8))),
    huffman(new Array(30).fill(5)),
  ];
  const codes = () => {
    const literals = bits(5) + 257, distances = bits(5) + 1, count = bits(4) + 4;
    const order = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];
    const own = new Array(19).fill(0);
    for (let n = 0; n < count; n++) own[order[n]] = bits(3);
    const table = huffman(own), lengths = [];
    while (lengths.length < literals + distances) {
      const next = symbol(table);
      if (next < 16) lengths.push(next);
      else {
        const value = next === 16 ? lengths[lengths.length - 1] : 0;
        const times = next === 16 ? 3 + bits(2) : next === 17 ? 3 + bits(3) : 11 + bits(7);
        for (let n = 0; n < times; n++) lengths.push(value);
      }
    }
    return [huffman(lengths.slice(0, literals)), huffman(lengths.slice(literals))];
  };
  const block = ([literals, distances]) => {
    for (;;) {
      const next = symbol(literals);
      if (next === 256) return;
      if (next < 256) {
        grow(1);
        out[size++] = next;
        continue;
      }
      const n = next - 257;
      const extra = n < 8 || n === 28 ? 0 : (n >> 2) - 1;
      const length = n === 28 ? 258 : n < 8 ? n + 3 : (((n & 3) + 4) << extra) + 3 + bits(extra);
      const far = symbol(distances);
      const more = far < 4 ? 0 : (far >> 1) - 1;
      const distance = far < 4 ? far + 1 : (((far & 1) + 2) << more) + 1 + bits(more);
      grow(length);
      for (let k = 0; k < length; k++, size++) out[size] = out[size - distance];
    }
  };
  let last = 0;
  while (!last) {
    last = bits(1);
    const kind = bits(2);
    if (kind === 0) {
      held = have = 0;
      const length = bytes[at] | (bytes[at + 1] << 8);
      at += 4;
      grow(length);
      out.set(bytes.subarray(at, at + length), size);
      at += length;
      size += length;
    } else block(kind === 1 ? fixed : codes());
  }
  return out.subarray(0, size);
}
