// What the server tells, as `agentlightning/dashboard` writes it. Times are seconds since the epoch.

export interface Session {
  allowed: boolean;
  can_log_out: boolean;
  live: boolean;
  version: string;
}

export type RunStatus = "running" | "succeeded" | "failed" | "stopped" | "ended";

/** How a run stands, in a word, and why. */
export interface Standing {
  word: string;
  why: string | null;
}

/** What `agentlightning/metrics/catalogue.py` says of a metric. */
export interface Metric {
  name: string;
  title: string;
  group: string;
  unit: string;
  sentence: string;
  kind: "curve" | "counter" | "figure" | "hidden";
}

export interface RunHead {
  run_id: string;
  /** Of its folder. */
  name: string;
  standing: Standing;
  algorithm: string;
  agent: string;
  status: RunStatus;
  error: string | null;
  start_time: number;
  end_time: number | null;
  steps: number | null;
  /** The folder of a run that has a store of its own: only its curves and settings are known here. */
  elsewhere: string | null;
  state: { doing?: string | null; step?: number; run_dir?: string };
}

export interface ListedRun extends RunHead {
  curve: [number, number][];
  validated: [number, number][];
  reward: number | null;
  steps_done: number | null;
  resumed: boolean;
  model: string | null;
}

export interface Run extends RunHead {
  settings: Record<string, unknown>;
}

export type StepRow = Record<string, number | string | boolean | null> & { step: number; time: number };

export interface RunEvent {
  kind: "note" | "warning" | "verdict" | "event";
  time: number;
  step: number | null;
  data: Record<string, unknown>;
}

export interface Finding {
  code: string;
  severity: string;
  words: string;
  fix: string;
  evidence: { rollouts?: string[] } & Record<string, unknown>;
}

export interface Diagnosis {
  verdict: string;
  findings: Finding[];
  measured: Record<string, unknown>;
  /** Those of `measured` that have a title. */
  numbers: (Metric & { value: number })[];
}

/** The lowest and the highest reward of a run's rollouts. */
export interface RewardRange {
  low: number | null;
  high: number | null;
}

export interface ListedRollout {
  rollout_id: string;
  task: string;
  mode: string | null;
  status: string;
  step: number | null;
  group: string | null;
  reward: number | null;
  outcome: string | null;
  error: string | null;
  start_time: number;
  end_time: number | null;
  attempts: number;
  run_id: string | null;
}

export interface Attempt {
  attempt_id: string;
  sequence_id: number;
  status: string;
  outcome: string | null;
  error: string | null;
  worker_id: string | null;
  start_time: number;
  end_time: number | null;
}

export interface Part {
  type?: string;
  content?: unknown;
  name?: string;
  arguments?: unknown;
  response?: unknown;
  result?: unknown;
  id?: string;
}

export interface Message {
  role: string;
  parts: Part[];
}

export interface Divergence {
  position: number;
  tokens_lost: number;
  cause: string;
  /** What both have before it, how the history went on, how the prompt goes on, and what to change: where they are known. */
  before?: string;
  was?: string;
  now?: string;
  advice?: string;
}

export interface Call {
  call_id: string;
  span_id: string;
  continues: string | null;
  same_input_as: string | null;
  agent: string | null;
  model: string | null;
  trained: boolean;
  recorded: boolean;
  /** Calls of the attempt with an answer of ours before this one: what `agl fork --at` counts. */
  answered_before: number;
  versions: number[];
  finish_reason: string | null;
  prompt_tokens: number | null;
  response_tokens: number | null;
  divergence: Divergence | null;
  temperature: number | null;
  start_time: number | null;
  end_time: number | null;
  error: string | null;
  input: Message[];
  output: Message[];
  tools: unknown;
}

export interface Span {
  span_id: string;
  parent_id: string | null;
  name: string;
  start_time: number | null;
  end_time: number | null;
  status: string;
  description: string | null;
  rewards: Record<string, number>;
  call_id: string | null;
  attributes: Record<string, unknown>;
  events: unknown[];
}

/** A rollout that the run let go on from the state before a call of another. */
export interface Fork {
  rollout_id: string;
  call_id: string;
  reward: number | null;
  outcome: string | null;
}

export interface Rollout extends Omit<ListedRollout, "task"> {
  task: unknown;
  run_name: string | null;
  metadata: Record<string, unknown>;
  resources_id: string | null;
  attempts_made: Attempt[];
  attempt_id: string | null;
  calls: Call[];
  fork_command: string;
  forks: Fork[];
  spans: Span[];
  spans_left_out: number;
}

export interface Segment {
  segment_id: string;
  parent: string | null;
  keep: number;
  response: string | null;
  ids: number[];
  texts: string[] | null;
  logprobs: (number | null)[] | null;
  plain_logprobs: (number | null)[] | null;
  versions: [number, number][];
}

export interface TokenCall {
  call_id: string;
  prompt_segment: string;
  response_segment: string;
  trained: boolean;
  agent: string | null;
  policy: string;
  finish_reason: string;
  continues: string | null;
  temperature: number;
  divergence: Divergence | null;
  advantages: (number | null)[] | null;
}

export interface Tokens {
  texts: string | null;
  advantages: string | null;
  tokens: number;
  segments: Segment[];
  calls: TokenCall[];
}

/** What a run's own weights make of the tokens now; `reason`: why that cannot be said. */
export interface Scores {
  step: number | null;
  reason: string | null;
  calls: Record<string, { ratios: (number | null)[]; entropies: (number | null)[] }>;
}

export interface Sibling {
  rollout_id: string;
  status: string;
  reward: number | null;
  outcome: string | null;
  advantage: number | null;
  calls: number;
  tokens: number;
  seconds: number | null;
}

export interface Parting {
  call: number;
  position: number;
  in_prompt: boolean;
  before: string[];
  one: string[];
  other: string[];
}

export interface Group {
  group: string | null;
  step: number | null;
  run_id: string | null;
  run_name: string | null;
  task: unknown;
  advantages: string | null;
  siblings: Sibling[];
  best: string | null;
  worst: string | null;
  partings: Record<string, Parting | null>;
}

export interface ResourcesVersion {
  resources_id: string;
  version: number;
  create_time: number;
  update_time: number;
  resources: Record<string, Record<string, unknown>>;
}

export interface WorkersView {
  workers: {
    worker_id: string;
    status: string;
    last_heartbeat_time: number | null;
    last_busy_time: number | null;
    current_rollout_id: string | null;
    heartbeat_stats: Record<string, unknown> | null;
  }[];
  total: number;
  rollouts: Record<string, number>;
  attempts: Record<string, number>;
  spans: number;
  calls: number;
}
