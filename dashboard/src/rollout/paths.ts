// Segments put together: which tokens a call saw and sampled, with what was recorded of each.

import type { Scores, Segment, TokenCall, Tokens } from "../types.ts";

export interface Token {
  index: number;
  id: number;
  text: string;
  segment: string;
  /** Sampled by this call, or by one it continues; the others are the prompt's. */
  sampled: boolean;
  call: number | null;
  trained: boolean;
  logprob: number | null;
  plain: number | null;
  advantage: number | null;
  version: number | null;
  /** Of the weights that were asked, where they were: π now / π then, and the entropy in nats. */
  ratio: number | null;
  entropy: number | null;
}

export interface Placed {
  segment: Segment;
  start: number;
  end: number;
  lane: number;
  children: Placed[];
}

/** The tokens from the root to the end of a call's response. */
export function tokensOf(data: Tokens, call: TokenCall, scores?: Scores): Token[] {
  const segments = new Map(data.segments.map((segment) => [segment.segment_id, segment]));
  const byResponse = new Map(data.calls.map((one, index) => [one.response_segment, { call: one, index }]));
  const chain: { segment: Segment; take: number }[] = [];
  let current = segments.get(call.response_segment);
  let take = current?.ids.length ?? 0;
  while (current) {
    chain.unshift({ segment: current, take });
    take = current.keep;
    current = current.parent === null ? undefined : segments.get(current.parent);
  }
  const tokens: Token[] = [];
  const sampledSoFar = new Map<string, number>();
  for (const { segment, take: count } of chain) {
    const owner = segment.response === null ? undefined : byResponse.get(segment.response);
    const scored = owner && scores?.calls[owner.call.call_id];
    const before = owner ? (sampledSoFar.get(owner.call.call_id) ?? 0) : 0;
    for (let n = 0; n < count; n++) {
      tokens.push({
        index: tokens.length,
        id: segment.ids[n],
        text: segment.texts ? segment.texts[n] : `⟨${segment.ids[n]}⟩`,
        segment: segment.segment_id,
        sampled: owner !== undefined,
        call: owner ? owner.index + 1 : null,
        trained: owner?.call.trained ?? false,
        logprob: segment.logprobs?.[n] ?? null,
        plain: segment.plain_logprobs?.[n] ?? null,
        advantage: owner?.call.advantages?.[before + n] ?? null,
        version: versionAt(segment, n),
        ratio: scored?.ratios[before + n] ?? null,
        entropy: scored?.entropies[before + n] ?? null,
      });
    }
    if (owner) sampledSoFar.set(owner.call.call_id, before + count);
  }
  return tokens;
}

function versionAt(segment: Segment, n: number): number | null {
  let found: number | null = null;
  for (const [start, version] of segment.versions) if (start <= n) found = version;
  return found;
}

/** All segments with their place: from which token to which, and on which lane. What goes on stays on its lane. */
export function layOut(data: Tokens): { placed: Placed[]; lanes: number; width: number } {
  const byId = new Map<string, Placed>();
  const segments = new Map(data.segments.map((segment) => [segment.segment_id, segment]));
  const place = (segment: Segment): Placed => {
    const known = byId.get(segment.segment_id);
    if (known) return known;
    const parent = segment.parent === null ? undefined : segments.get(segment.parent);
    const above = parent && place(parent);
    const start = above ? above.start + segment.keep : 0;
    const placed: Placed = { segment, start, end: start + segment.ids.length, lane: 0, children: [] };
    above?.children.push(placed);
    byId.set(segment.segment_id, placed);
    return placed;
  };
  for (const segment of data.segments) place(segment);
  let lanes = 0;
  const walk = (root: Placed, lane: number) => {
    let node: Placed | undefined = root;
    const branches: Placed[] = [];
    while (node) {
      node.lane = lane;
      const here: Placed = node;
      const straight: Placed | undefined = here.children.find((child) => child.start === here.end);
      branches.push(...here.children.filter((child) => child !== straight));
      node = straight;
    }
    for (const branch of branches) walk(branch, lanes++);
  };
  for (const placed of byId.values()) if (placed.segment.parent === null || !segments.has(placed.segment.parent)) walk(placed, lanes++);
  const all = [...byId.values()];
  return { placed: all, lanes, width: Math.max(1, ...all.map((one) => one.end)) };
}
