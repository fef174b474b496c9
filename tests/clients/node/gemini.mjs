// Google's client for Node, with a dummy key.
import { FunctionCallingConfigMode, GoogleGenAI } from "@google/genai";
import { BOOKING, DESCRIPTION, PARAMETERS, SYSTEM, baseURL, calc, model, question, required, stream } from "./tool.mjs";

const client = new GoogleGenAI({ apiKey: "dummy", httpOptions: { baseUrl: baseURL } });
const declared = (name, parametersJsonSchema) => [{ functionDeclarations: [{ name, description: DESCRIPTION, parametersJsonSchema }] }];
if (required) {
  const config = { tools: declared("book", BOOKING), toolConfig: { functionCallingConfig: { mode: FunctionCallingConfigMode.ANY } } };
  const answer = await client.models.generateContent({ model, contents: question, config });
  console.log(JSON.stringify(answer.functionCalls[0].args));
  process.exit();
}
const config = { systemInstruction: SYSTEM, tools: declared("calc", PARAMETERS), maxOutputTokens: 64 };
const chat = client.chats.create({ model, config });
let message = question;
for (let turn = 0; turn < 4; turn++) {
  const answers = [];
  if (stream) for await (const piece of await chat.sendMessageStream({ message })) answers.push(piece);
  else answers.push(await chat.sendMessage({ message }));
  const calls = answers.flatMap((answer) => answer.functionCalls ?? []);
  if (!calls.length) {
    console.log(answers.map((answer) => answer.text ?? "").join(""));
    break;
  }
  message = calls.map(({ id, name, args }) => ({ functionResponse: { id, name, response: { output: calc(args) } } }));
}
