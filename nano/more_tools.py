"""Draw tools for training only: agents' tools, invented names, nested values, longer schemas."""

# ruff: noqa: E501 (tables of phrases)

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from nano import unseen
from nano.suites import common, tool_calls, tool_values
from nano.suites.tool_domains import Row

# rows as in suites/tool_domains: names, descriptions, (parameter names, kind, descriptions,
# fragment), requests, list requests
ROWS: tuple[Row, ...] = (
    (
        "get_weather|get_current_weather|weather|getWeather|current_temperature|fetchWeather|weather_now",
        "Get the current weather for a city.|Get the current weather|Get current temperature for "
        "a given location.|Returns the weather for a given city.|Weather of a city|Get the "
        "weather in a given location",
        (
            ("city|location|place|town|q|query|city_name|loc", "string:town", "City name|The city|City and country e.g. Bogotá, Colombia|The city and state, e.g. San Francisco, CA||The name of the city", ""),
            ("unit|units|format|temp_unit|scale", "enum:celsius,fahrenheit", "|The unit of temperature|The temperature unit to use. Infer this from the users location.|Unit", " in {v}|, in {v}|, please use {v}| with unit {v}"),
            ("days|num_days|forecast_days", "integer:1-14", "|Number of days|Days to look ahead", " for {v} days| for the next {v} days"),
        ),
        "What is the weather in {0}{opt}?|whats the weather in {0} right now{opt}|"
        "What's the weather like in {0}{opt}?|What is the "
        "weather like in {0}{opt}?|How is the weather in {0} today{opt}?|Get the weather for "
        "{0}{opt}.|Weather in {0}{opt}?|Give me the weather of {0}{opt}.|What's the temperature "
        "in {0}{opt}?|Is it cold in {0}{opt}?|Is it sunny in {0} now{opt}?|Check the weather in "
        "{0}{opt}|Please tell me how the weather is in {0}{opt}.",
        "What's the weather like in {list}?|Get the weather for {list}.|Weather in {list}?|What "
        "is the weather in {list} today?|How warm is it in {list}?",
    ),
    (
        "bash|run_command|execute_command|run_shell|exec|terminal|run_terminal_cmd|shell_exec",
        "Executes a bash command.|Run a command in the shell.|Execute a shell command and return "
        "its output.|Runs a command in the terminal and gives the output.",
        (
            ("command|cmd|line|script", "string:command", "The command to execute|The command|Shell command to run|", ""),
            ("timeout|timeout_ms|timeout_seconds", "integer:1-600", "Optional timeout|Seconds to wait|", " with a timeout of {v}|, timeout {v}"),
        ),
        "Run `{0}`{opt}.|Run {0}{opt}|Execute `{0}`{opt}.|Please run the command {0}{opt}|Run "
        "the command `{0}`{opt}, please.|Use the shell: {0}{opt}|What does `{0}` print{opt}?",
        "",
    ),
    (
        "read_file|Read|read|open_file|view|cat_file|get_file_contents|readFile",
        "Reads a file from the local filesystem.|Read the contents of a file.|Return the text of "
        "a file.",
        (
            ("path|file_path|filePath|filename|file", "string:file", "The path of the file|The absolute path to the file to read|Path|", ""),
            ("offset|start_line|start", "integer:1-900", "The line to start at|First line|", " from line {v}| starting at line {v}"),
            ("limit|num_lines|count", "integer:5-500", "How many lines to read|Number of lines|", ", {v} lines| and only {v} lines"),
        ),
        "Read {0}{opt}.|Read the file {0}{opt}.|What is in {0}{opt}?|Open {0}{opt}|Show me "
        "{0}{opt}.|Please read {0}{opt}|Show the contents of {0}{opt}.|Look at {0}{opt}.",
        "Read {list}.|Show me {list}.|Open {list}, please.",
    ),
    (
        "write_file|Write|create_file|save_file|write",
        "Writes a file to the local filesystem.|Write text to a file.|Create a file with the "
        "given content.",
        (
            ("path|file_path|filePath|filename", "string:file", "The path of the file|Where to write|", ""),
            ("content|text|contents|data", "string:sentence", "The content to write|The text|", ""),
        ),
        'Write "{1}" to {0}.|Create the file {0} with the text "{1}".|Save "{1}" in {0}.|Put '
        '"{1}" into {0}.|Write {0} with the content "{1}".',
        "",
    ),
    (
        "grep|search_files|Grep|search_code|find_in_files|ripgrep",
        "Searches file contents.|Search for a pattern in files.|A search tool for code.",
        (
            ("pattern|query|regex|term", "string:noun", "The pattern to search for|What to look for|", ""),
            ("path|directory|dir|folder", "string:file", "Where to search|File or directory|", " in {v}| inside {v}"),
        ),
        "Search for {0}{opt}.|Find {0}{opt}|Where is {0} used{opt}?|grep {0}{opt}|Look for "
        "{0}{opt}.|Find every use of {0}{opt}|Find all places that use {0}{opt}.",
        "Search for {list}.|Look for {list}.",
    ),
    (
        "web_search|search|search_web|google|bing_search|internet_search|searchWeb",
        "Search the web.|Searches the internet for a query.|Find pages on the web.",
        (
            ("query|q|search_query|terms|text", "string:query", "The search query|What to search for|", ""),
            ("max_results|num_results|count|top_k|maxResults", "integer:1-20", "How many results|Number of results|", ", {v} results| and give me {v} results"),
        ),
        'Search the web for {0}{opt}.|Search for "{0}"{opt}.|Google {0}{opt}|Look up {0} on the '
        'internet{opt}.|Find pages about "{0}"{opt}.|Search for {0}{opt}|search {0}{opt}|Can you '
        "search for {0}{opt}?|Look up {0}{opt}.|Find {0}{opt}.",
        "",
    ),
    (
        "create_calendar_event|add_event|create_event|calendar|new_event",
        "Create a calendar event.|Adds an entry to the calendar",
        (("title|name|event|summary", "string:query", "|The title", ""), ("date|day|on", "string:date", "|The day", ""),),
        "Put {0} in my calendar on {1}.|Add {0} to the calendar for {1}|Schedule {0} on {1}.|On {1} I have {0}, add it.",
        "",
    ),
    (
        "rename_file|move_file|rename|mv|moveFile",
        "Rename a file.|Moves a file",
        (("source|from|old_path|old_name|src", "string:file", "|The file", ""), ("destination|to|new_path|new_name|dst", "string:file", "|The new path", ""),),
        "Rename {0} to {1}.|Move {0} to {1}|Rename the file {0} to {1}, please.|mv {0} {1}",
        "",
    ),
    (
        "delete_file|remove_file|rm|delete|deleteFile",
        "Delete a file.|Removes a file",
        (("path|file|filename|target", "string:file", "|The file", ""),),
        "Delete {0}.|Get rid of {0} please|Remove the file {0}.|Throw away {0}|Please delete {0}.",
        "",
    ),
    (
        "list_files|list_directory|ls|listFiles|list_dir",
        "List the files of a folder.|Lists a directory",
        (("path|directory|folder|dir", "string:folder", "|The folder", ""),),
        "Which files are in {0}?|Which files are in the folder {0}?|List the files in {0}.|What is in the folder {0}?|ls {0}|Show me the folder {0}",
        "",
    ),
    (
        "git_checkout|switch_branch|checkout|git_switch",
        "Switch to a branch.|Checks out a git branch",
        (("branch|name|ref|branch_name", "string:branch", "|The branch", ""),),
        "Switch to the branch {0}.|Check out {0}|switch to branch {0}|Go to the branch {0}.",
        "",
    ),
    (
        "define_word|dictionary|get_definition|lookup_word|define",
        "Look up the meaning of a word.|A dictionary",
        (("word|term|text", "string:noun", "|The word", ""),),
        "What does {0} mean?|What does the word {0} mean?|Define {0}.|Define the word {0}|Look up the word {0}.",
        "",
    ),
    (
        "send_message|send_text|sms|send_sms|message",
        "Send a text message.|Writes to a contact",
        (("to|recipient|contact|name", "string:person", "|Who gets it", ""), ("message|text|body|content", "string:query", "|The text", ""),),
        "Text {0}: {1}|Send {0} the message {1}|Message {0}: {1}|Write to {0}: {1}|text {0} {1}",
        "",
    ),
    (
        "set_light|light|lights|control_light|setLight",
        "Switch the light of a room.|Controls a light",
        (("room|area|location", "string:room", "|The room", ""), ("state|power|value|mode", "enum:on,off", "|On or off", ""),),
        "Turn {1} the light in the {0}.|Turn the {0} light {1}|Switch {1} the lights in the {0}.|Lights {1} in the {0}",
        "",
    ),
    (
        "play_song|play_music|play|playSong",
        "Play a song.|Plays music",
        (("title|song|track", "string:title", "|The song", ""), ("artist|by|singer|band", "string:person", "|The artist", ""),),
        "Play {0} by {1}.|I'd like to hear {0} by {1}|Put on {0} by {1}.|I want to hear {0} by {1}, please",
        "",
    ),
    (
        "find_restaurants|search_restaurants|find_places|restaurants",
        "Find restaurants.|Searches for places to eat",
        (("cuisine|kind|type|food", "string:language", "|The cuisine", ""), ("city|location|where|place", "string:city", "|The city", ""),),
        "Find {0} restaurants in {1}.|Are there any {0} restaurants in {1}?|I'm hungry, are there {0} restaurants in {1}?|{0} food in {1}",
        "",
    ),
    (
        "convert_currency|exchange|currency|convertCurrency",
        "Convert money.|Exchange rates",
        (("amount|value|sum", "integer:1-999", "|How much", ""), ("from|from_currency|source", "string:currency", "|From", ""), ("to|to_currency|target", "string:currency", "|To", ""),),
        "How many {2} do I get for {0} {1}?|Convert {0} {1} to {2}.|{0} {1} in {2}|How much is {0} {1} in {2}?",
        "",
    ),
    (
        "turn_on_light|light_on|switch_on_light|lights_on|turnOnLight|set_light|light",
        "Turn on the light in a room.|Switches the light on|Light in a room",
        (("room|area|where|location|zone", "string:room", "|The room|Which room", ""),),
        "Turn on the light in the {0}.|Turn on the {0} light|Turn on the lights in the {0}, "
        "please.|Switch on the {0} light.|Turn the light in the {0} on|Light in the {0}, please",
        "Turn on the light in the {list}.",
    ),
    (
        "turn_on|switch_on|start_device|power_on|turnOn|turn_off|switch_off|stop_device",
        "Works on a device.|Controls a device at home|Switches a device",
        (("device|name|appliance|what", "string:device", "|The device|Name of the device", ""),),
        "Turn on the {0}.|Switch the {0} on.|Please turn off the {0}|Turn the {0} off|Start the "
        "{0}, please.|Stop the {0}.",
        "",
    ),
    (
        "translate|translate_text|translator|translateText",
        "Translate text into a language.|Translates a text|Translation of a text",
        (
            ("text|phrase|sentence|input", "string:query", "|The text|Text to translate", ""),
            ("language|to|target|target_language|lang", "string:language", "|The language|To", ""),
        ),
        'Translate {0} into {1}.|Translate "{0}" to {1}.|How do you say {0} in {1}?|Say {0} in '
        "{1}|Please translate {0} to {1}.|What is {0} in {1}?",
        "",
    ),
    (
        "create_reminder|remind|set_reminder|add_reminder|reminder|createReminder",
        "Create a reminder.|Reminds the user|Set a reminder for later",
        (
            ("title|text|task|what|message", "string:query", "|What to do|The text", ""),
            ("time|at|when|due", "string:clock", "|The time|When", ""),
        ),
        "Remind me to {0} at {1}.|Set a reminder to {0} at {1}|At {1} remind me to {0}|Reminder: "
        "{0} at {1}",
        "",
    ),
    (
        "add_note|create_note|note|save_note|add_todo|add_task|add_to_list|remember",
        "Saves a text.|Add an entry to the list.|Keeps a note",
        (("text|content|note|task|item|entry", "string:query", "|The text|What to save", ""),),
        "Note: {0}|Make a note: {0}|Add {0} to my list.|Write down {0}.|Save a note that says "
        "{0}|Add a task: {0}|Put {0} on the list",
        "",
    ),
    (
        "get_time|get_current_time|current_time|clock|time_in|getTime|now",
        "Get the current time in a city.|Returns the local time of a place.|Current time",
        (("timezone|city|location|tz|place|zone", "string:city", "The city|Time zone or city|", ""),),
        "What time is it in {0}?|What's the time in {0}?|Tell me the time in {0}.|Current time "
        "in {0}?|time {0}",
        "What time is it in {list}?|Give me the time in {list}.",
    ),
    (
        "add|add_numbers|sum|plus|addNumbers|multiply|multiply_numbers|times|product",
        "Works with two numbers.|Takes two integers.|Calculates with a and b",
        (("a|x|first|num1|left", "integer:0-9999", "|First number|The first number", ""), ("b|y|second|num2|right", "integer:0-9999", "|Second number|The second number", "")),
        "Use the tool on {0} and {1}.|Call it with {0} and {1}.|Use the tool with {0}, "
        "{1}.|Please use the tool for {0} and {1}.|Use your tool: {0} and {1}",
        "",
    ),
    (
        "calculator|calculate|evaluate|compute|calc|math_eval",
        "Evaluates an arithmetic expression.|A calculator.|Computes the value of an expression",
        (("expression|expr|formula|input", "string:expression", "The expression|The arithmetic expression to evaluate|", ""),),
        "Use the calculator for {0}.|Calculate {0} with the tool.|Evaluate {0}.|Compute {0} with "
        "the calculator.|Use the tool to work out {0}.",
        "",
    ),
    (
        "get_user|get_user_info|lookup_user|getUser|find_customer|get_order|get_order_status|track_order|lookup_order",
        "Looks up a record by its id.|Get details by id.|Returns the record with this id.",
        (("id|user_id|userId|order_id|orderId|customer_id|number", "string:code", "The id|Identifier|", ""),),
        "Look up {0}.|What is the status of {0}?|Find {0}, please.|Show me the record {0}.|Get "
        "the details of {0}.|Where is {0}?",
        "Look up {list}.|Show me {list}.",
    ),
)  # fmt: skip
VERBS = [
    "do", "run", "make", "fetch", "sync", "ping", "plan", "draw", "cook", "paint", "bake",
    "water", "feed", "walk", "call", "ask", "tell", "scan", "parse", "render", "deploy", "start",
    "stop", "count", "weigh", "mix", "blend", "fold", "spin", "lift", "load",
]  # fmt: skip
HINTS = [
    "Do not use it for anything else.",
    "Returns JSON.",
    "May be slow.",
    "Ask the user if something is missing.",
    "Only call it when needed.",
    "Needs a network.",
    "Results are cached.",
    "IMPORTANT: use exact values.",
    "Usage notes:\n- Values are case sensitive.\n- Call it once per item.",
    "Example: see the manual.",
    "Available since version {n}.",
]


class Composed(tool_calls.Tool):
    """A tool with values of training-only kinds."""


def everyday(rng: random.Random) -> tool_calls.Tool:
    return tool_calls._everyday_tool(rng.choice(ROWS), rng.choice(("snake", "snake", "camel")), rng)


def weather(rng: random.Random) -> tool_calls.Tool:
    return tool_calls._everyday_tool(ROWS[0], "snake", rng)


def composed(rng: random.Random) -> Composed:
    """Draw a tool whose name, keys and values are mostly invented words."""
    verb = rng.choice(VERBS) if rng.random() < 0.5 else rng.choice(tool_calls.VERBS)
    noun = unseen.word(rng) if rng.random() < 0.6 else rng.choice(common.NOUNS)
    parameters: list[tool_calls.Parameter] = []
    for _ in range(rng.choices((1, 2, 3, 4), weights=(34, 34, 22, 10))[0]):
        key = unseen.identifier(rng)
        if key.lower() not in {parameter.name.lower() for parameter in parameters}:
            parameters.append(_parameter(key, rng))
    name = unseen.identifier(rng, function=True) if rng.random() < 0.6 else f"{verb}_{noun}"
    article = "an" if noun[0] in "aeiou" else "a"
    description = rng.choice(
        (
            f"{verb.capitalize()} {article} {noun}.",
            f"Use this to {verb} {article} {noun}.",
            f"{verb.capitalize()}s the {noun}",
        )
    )
    return Composed(name, description, tuple(parameters), (), (), f"{verb} {article} {noun}")


def _parameter(key: str, rng: random.Random) -> tool_calls.Parameter:
    said = (
        "".join(f" {c.lower()}" if c.isupper() else c for c in key)
        .replace("_", " ")
        .replace("-", " ")
        .strip()
        if rng.random() < 0.7
        else key
    )
    kind = rng.choices(
        (
            "string:unseen",
            "integer:0-9999",
            "number:0-500",
            "boolean",
            "enum",
            "strings:unseen",
            "object",
        ),
        weights=(46, 18, 7, 8, 12, 4, 5),
    )[0]
    description = rng.choice(
        (
            "",
            "",
            f"The {said}",
            f"{said.capitalize()} to use",
            f"The {said} of the request",
            f"{said}, required",
        )
    )
    schema: dict[str, Any]
    if kind == "enum":
        options = list(
            dict.fromkeys(
                unseen.word(rng) if rng.random() < 0.6 else rng.choice(common.ADJECTIVES)
                for _ in range(rng.randint(2, 5))
            )
        )
        kind, schema = "enum:" + ",".join(options), {"type": "string", "enum": options}
    elif kind == "object":
        fields = list(dict.fromkeys(unseen.identifier(rng) for _ in range(rng.randint(1, 3))))
        types = [rng.choice(("string", "integer")) for _ in fields]
        schema = {
            "type": "object",
            "properties": {
                field: {"type": kind} for field, kind in zip(fields, types, strict=True)
            },
        }
        kind = "object:" + ",".join(
            f"{field}={kind}" for field, kind in zip(fields, types, strict=True)
        )
    else:
        schema = {"type": {"strings": "array"}.get(kind.partition(":")[0], kind.partition(":")[0])}
        if kind.startswith("strings"):
            schema["items"] = {"type": "string"}
    if description:
        schema = {**schema, "description": description}
    if rng.random() < 0.04 and schema["type"] == "integer":
        schema |= {"minimum": 0}
    fragments = (
        f"{said} {{v}}",
        f"{said}: {{v}}",
        f"{said} = {{v}}",
        f"the {said} {{v}}",
        f"{{v}} as the {said}",
        f"{said} is {{v}}",
    )
    return tool_calls.Parameter(key, kind, schema, rng.random() < 0.75, fragments)


def draw_value(kind: str, rng: random.Random) -> Any:
    """Draw a value of a training-only kind. Return None for other kinds."""
    if kind == "string:unseen":
        return unseen.value(rng)
    if kind == "strings:unseen":
        return list(
            dict.fromkeys(unseen.value(rng).replace(",", "") for _ in range(rng.randint(2, 3)))
        )
    if kind.startswith("object:"):
        fields = (part.split("=") for part in kind[7:].split(","))
        return {
            field: rng.randint(0, 999) if of == "integer" else unseen.word(rng)
            for field, of in fields
        }
    return None


def request(tool: tool_calls.Tool, rng: random.Random) -> tuple[str, tool_calls.Call]:
    """Draw a request for one call of a composed tool, in words or as arguments."""
    chosen = [p for p in tool.parameters if p.required or rng.random() < 0.5]
    values: dict[str, Any] = {}
    for parameter in chosen:
        drawn = draw_value(parameter.kind, rng)
        values[parameter.name] = (
            tool_values.draw_value(parameter.kind, rng) if drawn is None else drawn
        )
    call = tool_calls.Call(tool.name, values)
    if any(p.kind.startswith("object") for p in chosen) or rng.random() < 0.08:
        said = json.dumps(values, ensure_ascii=False)
        return rng.choice(
            (
                f"Call {tool.name} with {said}",
                f"Use {tool.name}: {said}",
                f"Please {tool.action}: {said}",
            )
        ), call
    return tool_calls._composed_text(tool, chosen, values, rng), call


def renamed(tool: tool_calls.Tool, rng: random.Random) -> tool_calls.Tool:
    """Give the tool an invented name, and invented keys if descriptions explain the keys."""
    if rng.random() < 0.5:
        tool = dataclasses.replace(tool, name=unseen.identifier(rng, function=True))
    if len(tool.parameters) == 1 or all(
        "description" in parameter.schema for parameter in tool.parameters
    ):
        keys: list[str] = []
        while len(keys) < len(tool.parameters):
            key = unseen.identifier(rng)
            if key not in keys:
                keys.append(key)
        tool = dataclasses.replace(
            tool,
            parameters=tuple(
                dataclasses.replace(p, name=key)
                for p, key in zip(tool.parameters, keys, strict=True)
            ),
        )
    return tool


def mixed(
    declared: Sequence[tool_calls.Tool],
    natural: Callable[[random.Random], tool_calls.Tool],
    rng: random.Random,
) -> list[tool_calls.Tool]:
    """Draw tools with at least one training-only kind. Some of the tools are renamed."""
    makers = (natural, composed, everyday, weather)
    made = [rng.choices(makers, weights=(18, 20, 10, 8))[0](rng)]
    if rng.random() < 0.25:
        made.append(everyday(rng))
    if rng.random() < 0.1:
        made = [everyday(rng) for _ in range(rng.randint(4, 9))]
    tools = [*made, *declared[1:]]
    if rng.random() < 0.2:
        tools = [renamed(tool, rng) if tool.requests else tool for tool in tools]
    rng.shuffle(tools)
    return list({tool.name: tool for tool in tools}.values())


def longer(declared: Sequence[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Add remarks and schema keys that real clients send."""
    tools = json.loads(json.dumps(list(declared)))
    for tool in tools:
        function, parameters = tool["function"], tool["function"]["parameters"]
        if rng.random() < 0.5:
            function["description"] = (
                f"{function.get('description', '')} "
                f"{rng.choice(HINTS).format(n=rng.randint(2, 9))}".strip()
            )
        if rng.random() < 0.15:
            function["strict"] = True
        if rng.random() < 0.3:
            parameters["$schema"] = "http://json-schema.org/draft-07/schema#"
        if rng.random() < 0.3:
            parameters["additionalProperties"] = False
        for key, schema in parameters["properties"].items():
            if rng.random() < 0.12:
                schema["title"] = key.replace("_", " ").title()
            if schema.get("type") == "string" and "enum" not in schema and rng.random() < 0.05:
                schema["minLength"] = 1
            if (
                key not in parameters.get("required", ())
                and schema.get("type") == "integer"
                and rng.random() < 0.1
            ):
                schema["default"] = rng.randint(1, 50)
    return list(tools)


def draw_request(
    declared: Sequence[tool_calls.Tool], rng: random.Random
) -> tuple[str, tuple[tool_calls.Call, ...]]:
    """Draw a request as `tool_calls.draw_request` does, also for the tools of this module."""
    if not any(isinstance(tool, Composed) for tool in declared):
        return tool_calls.draw_request(declared, rng)
    texts: list[str] = []
    calls: list[tool_calls.Call] = []
    for _ in range(rng.choices((1, 2, 3), weights=(82, 14, 4))[0]):
        target = rng.choice(declared)
        text, call = (
            request(target, rng)
            if isinstance(target, Composed)
            else tool_calls._single_request(target, rng)
        )
        texts.append(text if text[-1] in ".?!" else text + "\n")
        calls.append(call)
    return " ".join(texts).replace("\n ", "\n").strip(), tuple(calls)
