// The agent loop of the AI SDK: node loop.js URL whole|streamed. Prints what it saw, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [baseURL, how] = process.argv.slice(2);
const asked = [];
const weather = tool({
  description: "the weather",
  inputSchema: jsonSchema({
    type: "object",
    properties: { city: { type: "string" }, days: { type: "integer" } },
    required: ["city", "days"],
  }),
  execute: async (input) => {
    asked.push(input);
    return `sunny in ${input.city}`;
  },
});
const options = {
  model: createOpenAICompatible({ name: "kilolm", baseURL })("shakespeare"),
  prompt: "What is the weather?",
  tools: { weather },
  stopWhen: stepCountIs(5),
  maxRetries: 0,
};
const result = how === "streamed" ? streamText(options) : await generateText(options);
const text = await result.text;
const steps = await result.steps;
const reasons = steps.map((step) => step.finishReason);
console.log(JSON.stringify({ asked, text, reasons, first: steps[0].text }));
