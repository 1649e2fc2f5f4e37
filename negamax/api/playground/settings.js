// Reads and writes the form of the settings panel, and converts it into fields of a request.

const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "max_tokens",
  "min_tokens",
  "seed",
];
const NAMES = [
  ...NUMBERS,
  "stop",
  "system",
  "thinking",
  "effort",
  "budget",
  "tools",
  "tool_choice",
];

export const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the current weather for a city.",
      parameters: {
        type: "object",
        properties: {
          city: { type: "string" },
          unit: { type: "string", enum: ["celsius", "fahrenheit"] },
        },
        required: ["city"],
      },
    },
  },
];

// Returns all settings as texts by name.
export function readSettings(form) {
  const settings = Object.fromEntries(
    NAMES.map((name) => [name, form.elements[name].value.trim()]),
  );
  return { ...settings, parallel: form.elements.parallel.checked };
}

// Fills the form with settings. Unknown names are ignored.
export function writeSettings(form, settings) {
  for (const name of NAMES) {
    if (typeof settings[name] === "string") form.elements[name].value = settings[name];
  }
  if (typeof settings.parallel === "boolean") form.elements.parallel.checked = settings.parallel;
}

// Shows the server's defaults, such as {temperature: 1, …}, in empty fields.
export function showDefaults(form, defaults) {
  for (const [name, value] of Object.entries(defaults)) {
    const isOff = name === "top_k" && value === 0;
    if (form.elements[name]) form.elements[name].placeholder = isOff ? "off" : String(value);
  }
}

// Returns the request fields for the settings. The server chooses the values of empty settings.
// Throws an Error for wrong tools.
export function requestFields(settings) {
  const fields = {};
  for (const name of NUMBERS) {
    if (settings[name]) fields[name] = Number(settings[name]);
  }
  const stop = settings.stop.split("\n").filter(Boolean).map(unescaped);
  if (stop.length) fields.stop = stop;
  if (settings.thinking) fields.thinking = { type: settings.thinking };
  if (settings.effort) fields.reasoning_effort = settings.effort;
  if (settings.budget) fields.thinking_token_budget = Number(settings.budget);
  const tools = parsedTools(settings.tools);
  if (tools.length) {
    fields.tools = tools;
    if (settings.tool_choice) fields.tool_choice = settings.tool_choice;
    if (!settings.parallel) fields.parallel_tool_calls = false;
  }
  return fields;
}

// Replaces \\n and \\t in a line by a line break and a tab.
function unescaped(line) {
  return line.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}

// Returns the list of tools in `text`, or throws an Error that names the wrong place.
export function parsedTools(text) {
  if (!text.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools))
    throw new Error("The tools are not a list: begin with [ and end with ].");
  const nameless = tools.findIndex((tool) => typeof tool?.function?.name !== "string");
  if (nameless !== -1) throw new Error(`Tool ${nameless + 1} has no function.name.`);
  return tools;
}
