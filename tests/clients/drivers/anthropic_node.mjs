// The @anthropic-ai/sdk package: messages, stream, tools.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const tool = {
  name: "weather",
  input_schema: {
    type: "object",
    properties: { city: { enum: ["Oslo", "Rome"] } },
    required: ["city"],
  },
};
const must = (truth, what) => {
  if (!truth) throw new Error(what);
};

const exercises = {
  async chat() {
    const answer = await client.messages.create({ model: "m", max_tokens: 12, messages });
    must(answer.content[0].text, "no text");
  },
  async stream() {
    const stream = client.messages.stream({ model: "m", max_tokens: 12, messages });
    must((await stream.finalMessage()).content[0].text, "no text");
  },
  async tools() {
    const fields = { model: "m", max_tokens: 200, messages, tools: [tool] };
    const stream = client.messages.stream({ ...fields, tool_choice: { type: "any" } });
    const message = await stream.finalMessage();
    const call = message.content[0];
    must(["Oslo", "Rome"].includes(call.input.city), "no city");
    const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
    const history = [
      ...messages,
      { role: "assistant", content: message.content },
      { role: "user", content: [result] },
    ];
    const answer = await client.messages.create({ model: "m", max_tokens: 12, messages: history });
    must(answer.content.length, "no answer");
  },
};
for (const [name, exercise] of Object.entries(exercises)) {
  await exercise();
  console.log("did", name);
}
