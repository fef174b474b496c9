// What all three programs share: the tool, and what they are told on the command line.
export const [question, baseURL, model, stream, required, provider] = process.argv.slice(2);
export const SYSTEM = "Answer the question. Use the calc tool for every operation.";
export const PARAMETERS = {
  type: "object",
  properties: {
    a: { type: "number" },
    op: { type: "string", enum: ["+", "-", "*", "/"] },
    b: { type: "number" },
  },
  required: ["a", "op", "b"],
};
export const DESCRIPTION = "One operation on two numbers.";
export function calc({ a, op, b }) {
  const value = { "+": a + b, "-": a - b, "*": a * b, "/": a / b }[op];
  return value === undefined ? "Error: op must be one of + - * /" : String(value);
}
export const BOOKING = {
  type: "object",
  properties: { room: { type: "string", enum: ["red", "blue"] }, seats: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["room", "seats"],
};
