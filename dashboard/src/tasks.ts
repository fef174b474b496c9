// Tasks in a few words: which of their fields is shown, and how.

import { visible } from "./format.ts";

type Fields = Record<string, string>;
const WHOLE = "";

/** The fields of a task as texts; a task that is no object is one field without a name. */
export function fieldsOf(task: unknown): Fields {
  const value = typeof task === "string" ? parsed(task) : task;
  if (value === null || typeof value !== "object" || Array.isArray(value)) return { [WHOLE]: text(value) };
  return Object.fromEntries(Object.entries(value).map(([name, field]) => [name, text(field)]));
}

function text(value: unknown): string {
  return typeof value === "string" ? value : (JSON.stringify(value) ?? "");
}

/** JSON text as its value, also where its end was cut off; what is no JSON is text. */
function parsed(json: string): unknown {
  for (const candidate of [json, closed(json), closed(json.slice(0, lastComma(json)))]) {
    try {
      return JSON.parse(candidate);
    } catch {
      continue;
    }
  }
  return json;
}

/** What is open in a text of JSON, from the outside to the inside, and whether a string is. */
function open(json: string): { ends: string[]; inText: boolean; comma: number } {
  const ends: string[] = [];
  let [inText, comma] = [false, 0];
  for (let at = 0; at < json.length; at++) {
    const sign = json[at];
    if (inText) {
      if (sign === "\\") at++;
      else if (sign === '"') inText = false;
    } else if (sign === '"') inText = true;
    else if (sign === "{") ends.push("}");
    else if (sign === "[") ends.push("]");
    else if (sign === "}" || sign === "]") ends.pop();
    else if (sign === "," && ends.length === 1) comma = at;
  }
  return { ends, inText, comma };
}

function closed(json: string): string {
  const { ends, inText } = open(json);
  return (inText ? json.replace(/\\(u[\da-f]{0,3})?$/i, "") + '"' : json) + ends.reverse().join("");
}

function lastComma(json: string): number {
  return open(json).comma;
}

/** The field that tells these tasks apart best: the one with the most different values, of equals the longest text. */
export function differing(tasks: Fields[]): string {
  const names = [...new Set(tasks.flatMap((task) => Object.keys(task)))];
  let best = { name: names[0] ?? WHOLE, values: 0, length: 0 };
  for (const name of names) {
    const values = tasks.map((task) => task[name] ?? "");
    const found = { name, values: new Set(values).size, length: values.reduce((sum, value) => sum + (/[a-z]/i.test(value) ? value.length : 0), 0) };
    if (found.values > best.values || (found.values === best.values && found.length > best.length)) best = found;
  }
  return best.name;
}

const MOST_SHARED = 40;

/** A field of each task; a beginning that all have in common is left out where it is long. */
export function shownTasks(tasks: Fields[], field: string): string[] {
  const texts = tasks.map((task) => (field in task ? task[field] : whole(task)).replace(/\s+/g, " ").trim());
  const shared = texts.length > 1 ? sharedBy(texts) : 0;
  return texts.map((one) => visible(shared > MOST_SHARED ? `… ${one.slice(shared)}` : one));
}

export function whole(task: Fields): string {
  return Object.entries(task).map(([name, value]) => (name ? `${name}: ${value}` : value)).join(" · ");
}

/** How many signs all texts begin with, to the beginning of a word. */
function sharedBy(texts: string[]): number {
  const distinct = [...new Set(texts)];
  if (distinct.length < 2) return 0;
  let end = 0;
  while (distinct.every((one) => end < one.length && one[end] === distinct[0][end])) end++;
  return distinct[0].lastIndexOf(" ", end) + 1;
}

/** A task in one line: the longest of its texts. */
export function oneLine(task: unknown): string {
  const longest = Object.values(fieldsOf(task)).reduce((best, value) => (value.length > best.length ? value : best), "");
  return visible(longest.replace(/\s+/g, " ").trim());
}
