// OpenAI's client for Node: a job from the upload to a chat with its model. Arguments: base URL, method, files as JSON.
import OpenAI, { toFile } from "openai";

const [baseURL, kind, given] = process.argv.slice(2);
const { train, validation, method } = JSON.parse(given);
const client = new OpenAI({ baseURL, apiKey: "dummy", maxRetries: 0 });
const upload = async (rows) => {
  const lines = rows.map((row) => JSON.stringify(row) + "\n").join("");
  const file = await toFile(Buffer.from(lines), "lines.jsonl");
  return (await client.files.create({ file, purpose: "fine-tune" })).id;
};
const asked = { model: "calc", training_file: await upload(train), validation_file: await upload(validation), method, seed: 1 };
let job = await client.fineTuning.jobs.create(asked);
while (!["succeeded", "failed", "cancelled"].includes(job.status)) {
  await new Promise((resolve) => setTimeout(resolve, 200));
  job = await client.fineTuning.jobs.retrieve(job.id);
}
const events = [];
for await (const event of client.fineTuning.jobs.listEvents(job.id, { limit: 3 })) events.push(event);
const checkpoints = [];
for await (const one of client.fineTuning.jobs.checkpoints.list(job.id, { limit: 1 })) checkpoints.push(one.step_number);
const said = { status: job.status, error: job.error, checkpoints };
said.steps = events.filter((event) => event.type === "metrics").map((event) => event.data);
if (job.status === "succeeded") {
  const model = job.fine_tuned_model;
  const messages = [{ role: "user", content: "5 + 1?" }];
  const chat = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 8 });
  said.chat = chat.choices[0].message.content;
  const answer = await client.responses.create({ model, input: "5 + 1?", max_output_tokens: 8 });
  said.response = answer.status;
  said.table = (await (await client.files.content(job.result_files[0])).text()).split("\n")[0];
  said.deleted = (await client.models.delete(model)).deleted;
  const gone = await client.chat.completions.create({ model, messages }).catch((error) => error);
  said.gone = [gone.status, gone.code];
}
console.log(JSON.stringify(said));
