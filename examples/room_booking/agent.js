// The room booking agent in Node, without packages. It knows nothing of Agent Lightning: its task is on stdin, its model
// at OPENAI_BASE_URL, and its answer the last line.

const TOOL = {
  type: "function",
  function: {
    name: "get_rooms_and_availability",
    description: "All rooms.",
    parameters: { type: "object", properties: { date: { type: "string" } }, required: ["date"] },
  },
};

async function ask(messages) {
  const { OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL } = process.env;
  const response = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${OPENAI_API_KEY}`, "content-type": "application/json" },
    body: JSON.stringify({ model: OPENAI_MODEL, messages, tools: [TOOL] }),
  });
  if (!response.ok) throw new Error(`${response.status} ${await response.text()}`);
  return (await response.json()).choices[0].message;
}

async function main() {
  const task = JSON.parse(require("fs").readFileSync(0, "utf8"));
  const messages = [
    { role: "system", content: "You help people to find a meeting room.\nAnswer with the id of one room." },
    { role: "user", content: task.request },
  ];
  for (let turn = 0; turn < 3; turn++) {
    const message = await ask(messages);
    if (!message.tool_calls?.length) return console.log(message.content);
    messages.push(message);
    for (const call of message.tool_calls)
      messages.push({ role: "tool", tool_call_id: call.id, content: JSON.stringify(task.rooms) });
  }
}

main();
