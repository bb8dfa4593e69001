// The openai package for Node: chat, stream, tools, responses.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "any", maxRetries: 0 });
const ask = [{ role: "user", content: "Say hello." }];
const tool = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Oslo", "Rome"] } },
      required: ["city"],
    },
  },
};
const must = (truth, what) => {
  if (!truth) throw new Error(what);
};

const exercises = {
  async chat() {
    const answer = await client.chat.completions.create({ model: "m", messages: ask, max_tokens: 12 });
    must(answer.choices[0].message.content, "no content");
  },
  async stream() {
    let text = "";
    const fields = { model: "m", messages: ask, max_tokens: 12, stream: true };
    for await (const chunk of await client.chat.completions.create(fields))
      text += chunk.choices[0]?.delta?.content ?? "";
    must(text, "no text");
  },
  async tools() {
    const fields = { model: "m", messages: ask, tools: [tool], tool_choice: "required" };
    const done = await client.chat.completions.stream(fields).finalChatCompletion();
    const message = done.choices[0].message;
    const call = message.tool_calls[0];
    must(["Oslo", "Rome"].includes(JSON.parse(call.function.arguments).city), "no city");
    const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
    const answer = await client.chat.completions.create({
      model: "m",
      messages: [...ask, message, result],
      max_tokens: 12,
    });
    must(answer.choices[0].message.content, "no answer");
  },
  async responses() {
    const fields = { model: "m", input: "Say hello.", max_output_tokens: 12 };
    const answer = await client.responses.create(fields);
    must(answer.output_text, "no text");
    let text = "";
    for await (const event of await client.responses.create({ ...fields, stream: true }))
      if (event.type === "response.output_text.delta") text += event.delta;
    must(text, "no streamed text");
  },
};
for (const [name, exercise] of Object.entries(exercises)) {
  await exercise();
  console.log("did", name);
}
