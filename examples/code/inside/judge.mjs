// Runs inside the sandbox: calls the function f of the JavaScript on stdin with inputs, and prints what it gives.
//
// It is given no expected value, so nothing that the code does here can make a wrong answer right.
import { readFileSync } from "node:fs";

const given = JSON.parse(readFileSync(0, "utf8"));
const write = process.stdout.write.bind(process.stdout);
process.stdout.write = () => true; // what the code prints is no answer
const f = new Function(`${given.code}\n;return f;`)();
const found = given.inputs.map((value) => f(value));
write(`${JSON.stringify(found)}\n`);
