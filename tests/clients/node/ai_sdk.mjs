// Vercel's AI SDK, with a dummy key: its provider for whatever is like OpenAI, or its default one, which asks Responses.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { BOOKING, DESCRIPTION, PARAMETERS, SYSTEM, baseURL, calc, model, provider, question, required, stream } from "./tool.mjs";

const create = provider === "openai" ? createOpenAI : createOpenAICompatible;
const llm = create({ name: "agentlightning", baseURL, apiKey: "dummy" })(model);
if (required) {
  const book = tool({ inputSchema: jsonSchema(BOOKING) });
  const asked = { model: llm, prompt: question, tools: { book }, toolChoice: "required" };
  console.log(JSON.stringify((await generateText(asked)).toolCalls[0].input));
  process.exit();
}
const asked = {
  model: llm,
  system: SYSTEM,
  prompt: question,
  tools: { calc: tool({ description: DESCRIPTION, inputSchema: jsonSchema(PARAMETERS), execute: async (given) => calc(given) }) },
  stopWhen: stepCountIs(4),
  maxOutputTokens: 64,
};
const result = stream ? streamText(asked) : await generateText(asked);
console.log(await result.text);
