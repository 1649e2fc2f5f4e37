"""Everyday tools for `tool_calls`: names, descriptions, parameters, and ways to ask for a tool.

A row is (names, descriptions, parameters, requests, list requests). `|` separates alternatives. A
parameter is (names, kind, descriptions, fragment). A parameter with an empty fragment is required.
Otherwise the fragment is the text that an optional value adds to the request (`true form^false
form` for booleans). {0}, {1}, {2} are the required values in order, and {opt} is the place of
fragments. In a list request, {list} stands for several values of the first parameter, with one call
per value.
"""

# ruff: noqa: E501 (tables read better as one row per line)
# fmt: off

from __future__ import annotations

Row = tuple[str, str, tuple[tuple[str, str, str, str], ...], str, str]

DOMAINS: tuple[Row, ...] = (
    (
        "get_weather|current_weather|weather_lookup|fetch_weather|weather|get_current_weather|check_weather",
        "Get the current weather for a city.|Look up the weather in a place.|Return temperature "
        "and conditions for a location.",
        (
            (
                "city|location|place|town|location",
                "string:town",
                "Name of the city|The city to look up|Where to look||City and country|The city "
                "and state, e.g. San Francisco, CA|City name, e.g. Rome",
                "",
            ),
            ("unit|units|temperature_unit|scale", "enum:celsius,fahrenheit", "Temperature "
                                                                             "unit|Unit of the "
                                                                             "temperature|", " "
                                                                                             "in "
                                                                                             "{v}|, in {v}|, use {v}"),
        ),
        "What is the weather in {0}{opt}?|What's the weather like in {0}{opt}?|How is the "
        "weather in {0}{opt}?|Weather for {0}{opt}, please."
        "|Tell me the weather in {0}{opt}.|Is it raining in {0}{opt}?|How warm is it in "
        "{0}{opt}?|weather {0}{opt}|What's the weather in {0}{opt}?"
        "|Can you check the weather in {0}{opt}?|What is the temperature in {0}{opt}?|Do I need "
        "an umbrella in {0}{opt}?",
        "What is the weather in {list}?|Compare the weather in {list}.|How is the weather in "
        "{list} today?|What's the weather like in {list}?",
    ),
    (
        "get_forecast|weather_forecast|forecast|daily_forecast",
        "Get the weather forecast for the next days.|Forecast for a city.|Multi-day forecast.",
        (
            ("city|location|place", "string:city", "City name|The place|", ""),
            ("days|num_days|day_count", "integer:2-14", "Number of days|How many days ahead|", ""),
        ),
        "What is the forecast for {0} for the next {1} days?|Give me a {1} day forecast for "
        "{0}.|How will the weather be in {0} over {1} days?",
        "",
    ),
    (
        "send_email|email|compose_email|mail_send|send_mail",
        "Send an email.|Send an e-mail message to one person.|Compose and send a mail.",
        (
            ("to|recipient|address|email_address", "string:email", "Address of the recipient|Who "
                                                                   "gets the mail|Recipient", ""),
            ("subject|title|headline", "string:phrase", "Subject line|The subject of the "
                                                        "mail|", ""),
            ("body|text|message|content", "string:sentence", "Text of the mail|What the mail "
                                                             "says|", ""),
            ("urgent|high_priority|important", "boolean", "Whether the mail is urgent|Mark as "
                                                          "urgent|", " and mark it as urgent^ "
                                                                     "and do not mark it as "
                                                                     "urgent"),
        ),
        'Send an email to {0} with the subject "{1}" that says "{2}"{opt}.|Email {0}, subject '
        '"{1}", text "{2}"{opt}.'
        '|Please mail {0} about "{1}". Write "{2}"{opt}.|Write an email to {0} with subject '
        '"{1}" and body "{2}"{opt}.',
        "",
    ),
    (
        "send_message|send_sms|text_message|message_contact|notify",
        "Send a text message to a contact.|Send an SMS.|Send a short message to someone.",
        (
            ("recipient|contact|to|receiver|person", "string:person", "Name of the contact|Who "
                                                                      "receives the message|", ""),
            ("text|message|body|content", "string:sentence", "The message|Text to send|", ""),
        ),
        'Text {0} "{1}".|Send a message to {0}: {1}|Tell {0} "{1}".|Message {0} saying '
        '"{1}".|Please send {0} the message "{1}".',
        "",
    ),
    (
        "create_event|add_event|schedule_meeting|calendar_add|new_event|book_meeting",
        "Create a calendar event.|Add an event to the calendar.|Schedule a meeting.",
        (
            ("title|name|summary|subject", "string:phrase", "Title of the event|What it is "
                                                            "called|", ""),
            ("date|day|on_date", "string:date", "Date as YYYY-MM-DD|Day of the event|", ""),
            ("time|start_time|start|at", "string:time", "Start time as HH:MM|When it starts|", ""),
            ("duration|duration_minutes|minutes|length", "integer:15-180", "Length in "
                                                                           "minutes|Duration in "
                                                                           "minutes|", " for {v} "
                                                                                       "minutes|, {v} minutes long"),
            ("attendees|participants|guests|invitees", "strings:person", "Names of the people to "
                                                                         "invite|Who takes "
                                                                         "part|", " with {v}|, "
                                                                                  "invite {v}"),
            ("location|room|place", "string:place", "Where it takes place|Room|", " at {v}|, "
                                                                                  "location {v}"),
        ),
        'Add "{0}" to my calendar on {1} at {2}{opt}.|Schedule "{0}" for {1} at {2}{opt}.|Create '
        'an event called "{0}" on {1} at {2}{opt}.'
        '|Put "{0}" in the calendar, {1}, {2}{opt}.',
        "",
    ),
    (
        "set_reminder|create_reminder|remind_me|add_reminder",
        "Set a reminder.|Create a reminder for a given time.|Remind the user of something.",
        (
            ("text|task|what|message|note", "string:sentence", "What to be reminded of|The "
                                                               "reminder|", ""),
            ("time|when|at|remind_at", "string:time", "Time as HH:MM|When to remind|", ""),
        ),
        'Remind me to {0} at {1}.|Set a reminder for {1}: {0}|At {1}, remind me "{0}".|Please '
        'create a reminder at {1} saying "{0}".',
        "",
    ),
    (
        "set_alarm|create_alarm|alarm|wake_up",
        "Set an alarm.|Set an alarm clock.|Create an alarm at a time.",
        (
            ("time|at|alarm_time|hour", "string:time", "Time as HH:MM|When the alarm rings|", ""),
            ("label|name|title", "string:noun", "Label of the alarm|", " with the label {v}| and "
                                                                       "call it {v}"),
            ("repeat|daily|every_day", "boolean", "Whether it repeats every day|Repeat "
                                                  "daily|", " every day^ only once"),
        ),
        "Set an alarm for {0}{opt}.|Wake me up at {0}{opt}.|I need an alarm at {0}{opt}.|alarm "
        "at {0}{opt} please",
        "Set alarms for {list}.|I need alarms at {list}.",
    ),
    (
        "set_timer|start_timer|timer|countdown",
        "Start a timer.|Start a countdown timer.|Set a kitchen timer.",
        (
            ("minutes|duration|duration_minutes|length", "integer:1-120", "Duration in "
                                                                          "minutes|Minutes to "
                                                                          "run|", ""),
            ("label|name", "string:noun", "Name of the timer|", " for the {v}| named {v}"),
        ),
        "Set a timer for {0} minutes{opt}.|Start a {0} minute timer{opt}.|Timer, {0} "
        "minutes{opt}.|Count down {0} minutes{opt}.",
        "",
    ),
    (
        "convert_currency|currency_converter|exchange|exchange_money|fx_convert",
        "Convert an amount of money to another currency.|Currency conversion.|Exchange money "
        "between currencies.",
        (
            ("amount|value|sum", "number:1-5000", "How much money|Amount to convert|", ""),
            ("from|from_currency|source|source_currency|base", "enum:USD,EUR,GBP,JPY,CHF,CAD,AUD", "Currency of the amount|Source currency|", ""),
            ("to|to_currency|target|target_currency|quote", "enum:USD,EUR,GBP,JPY,CHF,CAD,AUD", "Currency to convert to|Target currency|", ""),
        ),
        "Convert {0} {1} to {2}.|How much is {0} {1} in {2}?|Exchange {0} {1} into {2}.|What are "
        "{0} {1} worth in {2}?|{0} {1} in {2} please",
        "",
    ),
    (
        "convert_units|unit_converter|convert|measure_convert",
        "Convert a value between units.|Unit conversion.|Convert measurements.",
        (
            ("value|amount|quantity|number", "number:1-900", "The value to convert|Number to "
                                                             "convert|", ""),
            ("from_unit|from|source_unit", "enum:km,miles,kg,pounds,meters,feet,liters,gallons", "Unit of the value|Source unit|", ""),
            ("to_unit|to|target_unit", "enum:km,miles,kg,pounds,meters,feet,liters,gallons", "Unit to convert to|Target unit|", ""),
        ),
        "Convert {0} {1} to {2}.|How many {2} are {0} {1}?|What is {0} {1} in {2}?",
        "",
    ),
    (
        "search_flights|find_flights|flight_search|lookup_flights",
        "Search for flights.|Find flights between two cities.|Look for a flight on a date.",
        (
            ("origin|from|from_city|departure|departure_city", "string:city", "City of "
                                                                              "departure|Where "
                                                                              "the flight "
                                                                              "starts|", ""),
            ("destination|to|to_city|arrival|arrival_city", "string:city", "City of "
                                                                           "arrival|Where the "
                                                                           "flight goes|", ""),
            ("date|departure_date|day", "string:date", "Date as YYYY-MM-DD|Day of the flight|", ""),
            ("passengers|travelers|seats|num_passengers", "integer:2-9", "Number of "
                                                                         "passengers|How many "
                                                                         "people fly|", " for "
                                                                                        "{v} "
                                                                                        "people| "
                                                                                        "for {v} "
                                                                                        "passengers"),
            ("cabin|class|travel_class", "enum:economy,business,first", "Travel "
                                                                        "class|Cabin|", " in {v} "
                                                                                        "class"),
            ("direct_only|nonstop|direct", "boolean", "Only direct flights|Whether stops are "
                                                      "excluded|", ", direct flights only^, "
                                                                   "stops are fine"),
        ),
        "Find flights from {0} to {1} on {2}{opt}.|I want to fly from {0} to {1} on "
        "{2}{opt}.|Search flights {0} to {1}, {2}{opt}."
        "|Are there flights from {0} to {1} on {2}{opt}?",
        "",
    ),
    (
        "book_hotel|find_hotel|hotel_search|reserve_hotel|search_hotels",
        "Find a hotel.|Reserve a hotel room.|Search hotels in a city.",
        (
            ("city|location|destination|place", "string:city", "City of the hotel|Where to "
                                                               "stay|", ""),
            ("check_in|arrival|from_date|start_date", "string:date", "Arrival date|First night, "
                                                                     "YYYY-MM-DD|", ""),
            ("nights|num_nights|stay", "integer:1-21", "Number of nights|How many nights|", ""),
            ("guests|people|num_guests", "integer:2-8", "Number of guests|How many "
                                                        "people|", " for {v} people| for {v} "
                                                                   "guests"),
            ("max_price|budget|price_limit", "number:40-600", "Highest price per night|Price "
                                                              "limit|", " for at most {v} per "
                                                                        "night|, budget {v}"),
        ),
        "Find a hotel in {0} from {1} for {2} nights{opt}.|Book a hotel in {0}, arriving {1}, "
        "{2} nights{opt}.|I need a room in {0} on {1} for {2} nights{opt}.",
        "",
    ),
    (
        "book_table|reserve_table|restaurant_booking|make_reservation",
        "Book a table at a restaurant.|Reserve a table.|Make a restaurant reservation.",
        (
            ("restaurant|restaurant_name|place|venue", "string:title", "Name of the "
                                                                       "restaurant|Where to "
                                                                       "eat|", ""),
            ("party_size|people|guests|seats", "integer:2-12", "Number of people|How many people "
                                                               "come|", ""),
            ("time|at|hour", "string:time", "Time as HH:MM|When|", ""),
            ("date|day", "string:date", "Date as YYYY-MM-DD|Day|", " on {v}"),
            ("outdoor|outside|terrace", "boolean", "Whether to sit outside|Outdoor "
                                                   "seating|", ", outside please^, inside please"),
        ),
        "Book a table for {1} at {0} at {2}{opt}.|Reserve a table at {0} for {1} people at "
        "{2}{opt}.|I'd like a table for {1} people at {0}, {2}{opt}.",
        "",
    ),
    (
        "get_stock_price|stock_price|quote_stock|lookup_stock|stock_quote",
        "Get the price of a stock.|Look up a share price.|Return the latest quote of a ticker.",
        (("symbol|ticker|stock|code", "string:ticker", "Ticker symbol|The stock|", ""),),
        "What is the price of {0}?|How is {0} trading?|Get the stock price of {0}.|What's {0} at "
        "right now?|quote for {0}",
        "What are the prices of {list}?|Get quotes for {list}.|Compare the stocks {list}.",
    ),
    (
        "play_music|play_song|start_playback|play_track|music_player",
        "Play a song.|Play music.|Start playing a track.",
        (
            ("song|title|track|name", "string:title", "Name of the song|What to play|", ""),
            ("artist|by|singer|band", "string:person", "Who performs it|Artist|", " by {v}"),
            ("volume|loudness|level", "integer:1-100", "Volume in percent|How loud|", " at "
                                                                                      "volume {v}"),
            ("shuffle|random|mix", "boolean", "Shuffle mode|", ", shuffle on^, shuffle off"),
        ),
        'Play "{0}"{opt}.|Please play {0}{opt}.|I want to hear {0}{opt}.|Put on "{0}"{opt}.',
        "",
    ),
    (
        "translate|translate_text|translator|translation",
        "Translate text to another language.|Translate a sentence.|Text translation.",
        (
            ("text|sentence|source_text|input", "string:sentence", "Text to translate|What to "
                                                                   "translate|", ""),
            ("language|target_language|to|target|lang", "enum:French,German,Spanish,Italian,Japanese,Chinese,Portuguese,Dutch", "Language to translate to|Target language|", ""),
        ),
        'Translate "{0}" to {1}.|How do you say "{0}" in {1}?|Translate into {1}: {0}|What is '
        '"{0}" in {1}?',
        "",
    ),
    (
        "set_light|control_light|light_control|dim_lights|set_lamp",
        "Control a lamp.|Set the brightness of the light in a room.|Change a light.",
        (
            ("room|area|place|zone", "string:room", "The room|Which room|", ""),
            ("brightness|level|percent", "integer:0-100", "Brightness in percent|How bright|", ""),
            ("color|colour|hue", "string:colour", "Colour of the light|", " in {v}| and make it "
                                                                          "{v}"),
        ),
        "Set the light in the {0} to {1} percent{opt}.|Dim the {0} light to {1}{opt}.|Put the "
        "{0} lamp at {1} percent{opt}.",
        "",
    ),
    (
        "set_temperature|thermostat|set_thermostat|heating|climate_set",
        "Set the thermostat.|Set the temperature of a room.|Control the heating.",
        (
            ("temperature|degrees|target|value", "number:10-30", "Temperature in degrees|Target "
                                                                 "temperature|", ""),
            ("room|zone|area", "string:room", "The room|Which room|", " in the {v}"),
        ),
        "Set the temperature to {0} degrees{opt}.|Make it {0} degrees{opt}.|Heat to "
        "{0}{opt}.|Thermostat to {0} degrees{opt}, please.",
        "",
    ),
    (
        "switch_device|toggle_device|device_power|turn_device|smart_switch",
        "Switch a device on or off.|Control a smart plug.|Turn a device on or off.",
        (
            ("device|name|appliance|target", "string:device", "Name of the device|What to "
                                                              "switch|", ""),
            ("on|power|state|enabled", "boolean", "true to switch on, false to switch "
                                                  "off|Whether it should be on|On or off", ""),
        ),
        "Turn {1} the {0}.|Switch {1} the {0}.|Please turn the {0} {1}.",
        "",
    ),
    (
        "add_todo|create_task|add_task|todo_add|new_task",
        "Add a task to the to-do list.|Create a task.|Add a to-do item.",
        (
            ("task|title|text|description|item", "string:sentence", "What has to be done|The "
                                                                    "task|", ""),
            ("priority|importance|level", "enum:low,medium,high", "Priority of the task|How "
                                                                  "important it is|", " with {v} "
                                                                                      "priority|, priority {v}"),
            ("due|due_date|deadline", "string:date", "Due date as YYYY-MM-DD|", ", due {v}| by "
                                                                                "{v}"),
            ("tags|labels|categories", "strings:noun", "Labels of the task|Tags|", ", tags {v}| "
                                                                                   "tagged {v}"),
        ),
        'Add "{0}" to my to-do list{opt}.|Create a task "{0}"{opt}.|New task: "{0}"{opt}.|Put '
        '"{0}" on the list{opt}.',
        "",
    ),
    (
        "shopping_list_add|add_to_cart|buy_item|add_item|order_item",
        "Add an item to the shopping list.|Put a product in the cart.|Order a product.",
        (
            ("item|product|name|article", "string:object", "Name of the product|What to buy|", ""),
            ("quantity|count|amount|number", "integer:2-99", "How many|Number of pieces|", ""),
            ("express|fast_delivery|rush", "boolean", "Express delivery|Whether it must come "
                                                      "fast|", " with express delivery^ without "
                                                               "express delivery"),
        ),
        "Add {1} {0} to my cart{opt}.|Order {1} {0}{opt}.|I want to buy {1} {0}{opt}.|Put {1} "
        "{0} on the shopping list{opt}.",
        "",
    ),
    (
        "track_package|parcel_status|track_order|shipment_status|order_status",
        "Track a package.|Get the status of an order.|Where is a parcel.",
        (("tracking_number|order_id|id|number|code", "string:code", "Tracking number|Id of the "
                                                                    "order|", ""),),
        "Where is my package {0}?|Track order {0}.|What is the status of {0}?|Has {0} been "
        "delivered?|Please check shipment {0}.",
        "Track the orders {list}.|Where are my packages {list}?|What is the status of {list}?",
    ),
    (
        "find_contact|get_contact|lookup_contact|contact_info|search_contacts",
        "Look up a contact.|Find the contact data of a person.|Search the address book.",
        (
            ("name|person|contact|query", "string:person", "Name of the person|Who to look "
                                                           "up|", ""),
            ("field|info|detail", "enum:phone,email,address,birthday", "Which detail to "
                                                                       "return|The wanted "
                                                                       "field|", ", only the "
                                                                                 "{v}| and "
                                                                                 "return the {v}"),
        ),
        "Find the contact {0}{opt}.|Look up {0}{opt}.|Show me the contact details of "
        "{0}{opt}.|Search my contacts for {0}{opt}.",
        "Look up {list}.|Find the contacts {list}.",
    ),
    (
        "web_search|search|search_web|internet_search|google",
        "Search the web.|Search the internet for a query.|Find web pages.",
        (
            ("query|q|search_terms|keywords|text", "string:phrase", "What to search for|The "
                                                                    "search terms|", ""),
            ("limit|max_results|top_k|count|num_results", "integer:1-20", "Number of "
                                                                          "results|Maximum "
                                                                          "number of "
                                                                          "results|", " and show "
                                                                                      "{v} "
                                                                                      "results|, "
                                                                                      "{v} "
                                                                                      "results"),
            ("safe|safe_search|family_filter", "boolean", "Safe search|", " with safe search^ "
                                                                          "without safe search"),
        ),
        'Search the web for "{0}"{opt}.|Google {0}{opt}.|Look up "{0}" online{opt}.|Find pages '
        'about {0}{opt}.',
        "",
    ),
    (
        "read_file|open_file|get_file|load_file|cat_file",
        "Read a file.|Return the contents of a file.|Open a text file.",
        (
            ("path|file|filename|file_path", "string:file", "Path of the file|The file|", ""),
            ("max_lines|limit|lines|line_count", "integer:1-500", "How many lines to read|Line "
                                                                  "limit|", ", only the first "
                                                                            "{v} lines| and show "
                                                                            "{v} lines"),
        ),
        "Read the file {0}{opt}.|Open {0}{opt}.|Show me {0}{opt}.|What is in {0}{opt}?|cat "
        "{0}{opt}",
        "Read the files {list}.|Open {list}.",
    ),
    (
        "run_command|execute|shell|run_shell|bash",
        "Run a shell command.|Execute a command.|Run a command in the terminal.",
        (
            ("command|cmd|line", "string:command", "The command line|Command to run|", ""),
            ("timeout|timeout_seconds|limit", "integer:5-600", "Timeout in seconds|", " with a "
                                                                                      "timeout "
                                                                                      "of {v} "
                                                                                      "seconds"),
        ),
        "Run `{0}`{opt}.|Execute `{0}`{opt}.|Please run the command `{0}`{opt}.",
        "",
    ),
    (
        "query_database|run_query|db_lookup|find_records|select_rows",
        "Look up rows of a table.|Query the database.|Find records.",
        (
            ("table|collection|table_name", "string:noun", "Name of the table|Which table|", ""),
            ("column|field|key|column_name", "string:noun", "Column to compare|Which column|", ""),
            ("value|equals|match", "string:any", "Value to look for|The wanted value|", ""),
            ("limit|max_rows|top", "integer:1-100", "Row limit|Maximum number of rows|", ", at "
                                                                                         "most "
                                                                                         "{v} "
                                                                                         "rows"),
        ),
        "Find rows in the table {0} where {1} is {2}{opt}.|Query {0} for {1} = {2}{opt}.|In "
        "table {0}, look for {2} in the column {1}{opt}.",
        "",
    ),
    (
        "transfer_money|send_money|pay|bank_transfer|make_payment",
        "Transfer money.|Send money to a person.|Make a payment.",
        (
            ("recipient|to|payee|person", "string:person", "Who gets the money|Name of the "
                                                           "recipient|", ""),
            ("amount|sum|value", "number:1-2000", "How much money|Amount to send|", ""),
            ("reference|note|purpose|memo", "string:phrase", "Reference text|Purpose|", ' with '
                                                                                        'the '
                                                                                        'note '
                                                                                        '"{v}"|, '
                                                                                        'reference "{v}"'),
        ),
        "Send {1} dollars to {0}{opt}.|Transfer {1} to {0}{opt}.|Pay {0} {1} dollars{opt}.",
        "",
    ),
    (
        "get_directions|route|navigate|find_route|directions",
        "Get directions.|Find a route between two places.|Navigation.",
        (
            ("start|from|origin", "string:place", "Where the trip starts|Start|", ""),
            ("end|to|destination", "string:place", "Where the trip ends|Destination|", ""),
            ("mode|travel_mode|by|transport", "enum:driving,walking,cycling,transit", "How to "
                                                                                      "travel|Means of transport|", " {v}| by {v}|, {v}"),
            ("avoid|avoid_list|without", "strings:road", "What to avoid|Things to "
                                                         "avoid|", ", avoid {v}"),
        ),
        "How do I get from {0} to {1}{opt}?|Route from {0} to {1}{opt}.|Navigate from {0} to "
        "{1}{opt}.|Directions from {0} to {1}{opt} please.",
        "",
    ),
    (
        "calculate|calculator|evaluate|compute|math_eval",
        "Evaluate an arithmetic expression.|Calculator.|Compute the value of an expression.",
        (("expression|formula|input|expr", "string:expression", "The expression|What to "
                                                                "compute|", ""),),
        "Use the calculator for {0}.|Evaluate {0} with the tool.|Compute {0} with the "
        "calculator.|Please run {0} through the calculator.",
        "",
    ),
    (
        "roll_dice|random_number|dice|draw_numbers",
        "Roll dice.|Draw random numbers.|Throw dice.",
        (
            ("count|number|dice|times", "integer:1-10", "How many dice|Number of dice|", ""),
            ("sides|faces|max", "integer:4-100", "Number of sides|How many sides|", " with {v} "
                                                                                    "sides"),
        ),
        "Roll {0} dice{opt}.|Throw {0} dice{opt}.|Please roll {0} dice{opt} for me.",
        "",
    ),
    (
        "sum_numbers|statistics|analyze_numbers|number_stats",
        "Compute a statistic of some numbers.|Statistics of a list of numbers.|Aggregate numbers.",
        (
            ("numbers|values|items|series", "integers:1-999", "The numbers|List of numbers|", ""),
            ("operation|stat|method|kind", "enum:sum,mean,median,max,min", "Which statistic|What "
                                                                           "to compute|", ""),
        ),
        "What is the {1} of {0}?|Compute the {1} of {0}.|Give me the {1} of the numbers {0}.",
        "",
    ),
    (
        "get_time|current_time|time_in|world_clock|local_time",
        "Get the current time in a city.|World clock.|Return the local time of a place.",
        (("city|place|location|timezone_city", "string:city", "City name|Where|", ""),),
        "What time is it in {0}?|Current time in {0}?|How late is it in {0}?|Tell me the local "
        "time in {0}.",
        "What time is it in {list}?|Show the time in {list}.",
    ),
    (
        "find_recipe|recipe_search|get_recipe|cook_ideas",
        "Find a recipe.|Search recipes by ingredients.|Recipe ideas.",
        (
            ("ingredients|with|items|have", "strings:food", "Ingredients to use|What is in the "
                                                            "kitchen|", ""),
            ("max_minutes|time|minutes", "integer:5-120", "Longest cooking time in "
                                                          "minutes|", " in under {v} minutes| in "
                                                                      "at most {v} minutes"),
            ("vegetarian|veggie|no_meat", "boolean", "Only vegetarian dishes|", ", vegetarian "
                                                                                "only^, meat is "
                                                                                "fine"),
        ),
        "What can I cook with {0}{opt}?|Find a recipe with {0}{opt}.|I have {0}. What can I "
        "make{opt}?",
        "",
    ),
    (
        "create_note|save_note|add_note|write_note|take_note",
        "Save a note.|Write a note.|Store a short note.",
        (
            ("title|name|heading", "string:phrase", "Title of the note|", ""),
            ("content|text|body", "string:sentence", "Text of the note|What to write|", ""),
            ("pinned|pin|sticky", "boolean", "Whether the note is pinned|", " and pin it^ and do "
                                                                            "not pin it"),
        ),
        'Save a note "{0}": "{1}"{opt}.|Write a note titled "{0}" with the text "{1}"{opt}.|Take '
        'a note called "{0}" that says "{1}"{opt}.',
        "",
    ),
    (
        "create_user|add_user|register_user|new_account|create_account",
        "Create a user account.|Register a user.|Add a new user.",
        (
            ("name|full_name|username|user", "string:person", "Name of the user|Who|", ""),
            ("email|mail|email_address", "string:email", "E-mail address|", ""),
            ("role|kind|level|access", "enum:admin,editor,viewer,guest", "Role of the "
                                                                         "user|Access "
                                                                         "level|", " as {v}| "
                                                                                   "with the "
                                                                                   "role {v}"),
            ("age|years", "integer:18-90", "Age in years|", ", age {v}"),
            ("active|enabled|is_active", "boolean", "Whether the account is active|", ", "
                                                                                      "active^, "
                                                                                      "not active"),
        ),
        "Create an account for {0} with the email {1}{opt}.|Register {0}, {1}{opt}.|Add the user "
        "{0} ({1}){opt}.",
        "",
    ),
)
