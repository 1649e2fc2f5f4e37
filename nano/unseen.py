"""Draw invented names, words and identifiers, so that the model learns to copy unknown text."""

# ruff: noqa: SIM905 (word lists read better as text)

from __future__ import annotations

import random
import string

from nano.suites import common

FIRST_NAMES = (
    "Aaron Abdul Abigail Agnes Ahmed Akira Alan Albert Alejandro Alex Alexander Alexandra Ali "
    "Alina Amanda Amelia Amina Amy Anders Andrea Andrew Angela Anita Anton Antonio Arjun Arthur "
    "Astrid Ava Barbara Beatrice Becky Benjamin Bernard Beth Billy Boris Brandon Brian Bruce "
    "Camila Carla Caroline Catherine Cecilia Charles Charlie Charlotte Chris Christina "
    "Christopher Claire Colin Craig Cynthia Dave Deborah Deepak Denise Dennis Derek Diego Dimitri "
    "Dmitri Dominic Donald Donna Dorothy Doug Dylan Eddie Edgar Edith Edward Eleanor Eli Elijah "
    "Elizabeth Elliot Eric Ernest Esther Ethan Eugene Evelyn Farid Farah Fernando Fiona Florence "
    "Francesca Francis Freya Gabriel Gary Gemma Geoffrey Gerald Gordon Graham Greg Greta Gunther "
    "Gustav Hamza Harold Harriet Harry Hassan Heather Heidi Helga Henrik Hiroshi Holly Howard Ian "
    "Ibrahim Imani Isaac Isabel Isabella Ismail Jackson Jacob Jake Jamie Jane Janet Jasmine Jason "
    "Jean Jeff Jenna Jennifer Jenny Jeremy Jesse Jessica Jill Jim Jimmy Joan Joe Joel Johanna "
    "Jordan Jorge Jose Joseph Josh Joshua Joy Joyce Judith Judy Justin Karl Katherine Kathy Katie "
    "Keith Kelly Ken Kenji Kenneth Kim Kimberly Kirsten Klaus Kumar Kurt Kyle Lars Lauren Layla "
    "Lee Leila Leon Leonard Lewis Lily Logan Lola Lorenzo Louis Louise Luca Luke Lydia Madison "
    "Magnus Mandy Manuel Margaret Mariam Marie Marina Mario Martha Martin Mary Mason Matt Matthew "
    "Max Megan Mei Melissa Mike Miguel Miriam Mohamed Molly Monica Morgan Nancy Naomi Natalia "
    "Natalie Natasha Nathan Neil Nelson Niamh Nicholas Nicole Nigel Nikolai Norman Oliver Oleg "
    "Oskar Owen Pamela Patricia Patrick Paula Paulo Pauline Philip Phoebe Pierre Rafael Rahul "
    "Ralph Ramon Randy Raul Raymond Rebecca Ricardo Richard Rob Roberto Rodrigo Roger Roland "
    "Ronald Rosie Ross Roy Ruby Russell Ruth Ryan Sabrina Sally Salma Samantha Samuel Sandra "
    "Sanjay Sasha Saul Scott Sean Sebastian Selma Serena Sergei Shannon Sharon Shirin Siddharth "
    "Silvia Simone Sophia Sophie Stanley Stella Stephanie Stephen Steve Steven Stuart Sue Susan "
    "Suzanne Svetlana Sylvia Tamara Tatiana Ted Teresa Terry Tiffany Timothy Todd Tomasz Tony "
    "Tracy Trevor Tyler Umar Valentina Vanessa Veronica Vicky Vijay Vincent Violet Virginia "
    "Vladimir Wanda Wayne Will William Wolfgang Yasmin Yolanda Yosef Yvonne Zachary Zahra Zainab "
    "Zhang Zoltan"
).split()
KEYS = (
    "access_key accuracy action active_users address_line age altitude answer aqi args "
    "artist_name asset_id attachments author available_seats avg barcode base_url battery begin "
    "bid birthday blood_type body_text branch_name brand budget_limit buyer calories category cc "
    "channel_id chunk_size city_name cloud_cover coins command commit_hash comment_text "
    "condition_text confidence contents continent coordinates cost count country_code created_at "
    "currency_code customer_id cwd data_source date_range day_of_week deadline default_value "
    "delay delta department depth departure description destination details device_name dew_point "
    "diameter difficulty directory discount display_name distance_km domain_name dose "
    "download_url due_date duration_seconds elevation email_body enabled encoding end_date "
    "endpoint engine_size entity_id error_code eta event_name exchange expiry extension "
    "feels_like feelsLike file_path filePath filter_by first_name flight_number force format "
    "from_date from_unit fuel function gate_number genre goal greeting group_name guests hash "
    "height hex_color hobby hostname hours html humidity_percent icon image_url include_hidden "
    "index ingredient ingredients input_text instruction interval is_active isbn iso_code "
    "item_count items job_title json_data key_name keyword keywords kind label_text lang "
    "last_name lastName latitude lat lng length_cm limit line_number lines_changed link list_name "
    "locale log_level lon longitude low_temp lyrics magnitude mail_to make mass max_price "
    "max_results max_tokens maxResults meal media_type member_count memory message_id meta method "
    "metric min_price minutes_left mode_name model_name money month mood movie_title name_of_pet "
    "new_name new_string nickname node_id note_text notify num_results number_of_people object "
    "offset old_string op operand operation options order_by origin output_format owner_name "
    "page_number page_size parent passengers passcode path pattern payload percent period "
    "phone_number pincode pixels player playlist_id pm25 points population postal_code power "
    "precipitation pressure priority_level product_name progress prompt provider qty query "
    "query_string rain_mm rating_value reason recipe_name recipients record_id ref region_name "
    "release_year remark repo repository reply request_id resolution response_text "
    "results_per_page return_date risk room_number row_count run_id salary schema score_value "
    "scope search_term searchTerm season_name seat_number seconds sender serial session_id "
    "severity shape sheet shipping sku sky skyCondition snow_depth sort_by sort_order "
    "source_language spaces species speed_kmh sql stage start_date start_line startTime "
    "state_name status_code stock_symbol street_name subtitle sunset symbol tag_name tags "
    "target_language target_path temp temp_c temp_max temperature_c tempo terms text_to_speak "
    "theme_name threshold thumbnail ticker time_of_day timeout timestamp timezone tip to_date "
    "to_unit token_count top_k topic_name track_id trip_id type_of_food uid units_sold uri "
    "user_id userId user_name username utc_offset uv_index uvIndex valid_until variant "
    "vendor_name vibe view_count visibility volume_level voltage warning weather_code website_url "
    "weight_kg width wind_direction wind_kph wind_speed windSpeed wind_gust year_built zip "
    "zip_code zone_id"
).split()
_ONSETS = (
    "b c d f g h j k l m n p qu r s t v w x y z bl br ch cl cr dr fl fr gl "
    "gr kr ph pl pr sc sh sk sl sm sn sp st str sw th tr tw wh zh"
).split()
_VOWELS = "a e i o u a e i o y ai au ea ee ei ia ie io oa oo ou ue".split()
_CODAS = "b ck d f g k l ll m n nd ng nk nt p r rd rk rn rt s sh sk ss st t th x z ct lt mp".split()
STEMS = sorted({part for key in KEYS for part in key.lower().split("_") if len(part) > 2})


def word(rng: random.Random) -> str:
    """Draw an invented word of one to four syllables that the shared generators lack."""
    syllables = rng.choices((1, 2, 3, 4), weights=(20, 45, 25, 10))[0]
    text = "" if syllables > 1 else rng.choice(_ONSETS)
    for _ in range(syllables):
        text += (
            (rng.choice(_ONSETS) if rng.random() < 0.88 else "")
            + rng.choice(_VOWELS)
            + (rng.choice(_CODAS) if rng.random() < 0.4 else "")
        )
    return text


def letters(rng: random.Random) -> str:
    pool = rng.choice(
        (
            string.ascii_lowercase,
            string.ascii_letters,
            string.ascii_lowercase + string.digits,
            string.ascii_uppercase,
        )
    )
    return rng.choice(string.ascii_letters) + "".join(
        rng.choice(pool) for _ in range(rng.randint(1, 9))
    )


def name(rng: random.Random) -> str:
    """Draw a person's first name that is known, rare or invented."""
    roll = rng.random()
    if roll < 0.45:
        return rng.choice(FIRST_NAMES)
    if roll < 0.6:
        return rng.choice(common.NAMES)
    if roll < 0.9:
        return word(rng).capitalize()
    if roll < 0.93:
        return f"{rng.choice(FIRST_NAMES)}-{rng.choice(FIRST_NAMES)}"
    if roll < 0.96:
        return (
            f"{rng.choice(FIRST_NAMES)} "
            f"{rng.choice((word(rng).capitalize(), rng.choice(common.SURNAMES)))}"
        )
    return rng.choice(("O'", "Mc", "Al-", "De ")) + word(rng).capitalize()


def identifier(rng: random.Random, *, function: bool = False) -> str:
    """Draw a program identifier from known or invented parts in one of the usual styles."""
    roll = rng.random()
    if roll < 0.35 and not function:
        return rng.choice(KEYS)
    if roll < 0.42:
        return letters(rng)
    parts: list[str] = []
    for _ in range(rng.choices((1, 2, 3), weights=(35, 50, 15))[0]):
        pick = rng.random()
        parts.append(
            rng.choice(STEMS)
            if pick < 0.45
            else rng.choice(common.NOUNS)
            if pick < 0.7
            else word(rng)
            if pick < 0.95
            else rng.choice(common.ADJECTIVES)
        )
    style = rng.random()
    if style < 0.55:
        text = "_".join(parts)
    elif style < 0.85:
        text = parts[0] + "".join(part.capitalize() for part in parts[1:])
    else:
        text = ("-" if function else "").join(
            part if function else part.capitalize() for part in parts
        )
    return text + str(rng.randint(1, 99)) if rng.random() < 0.06 else text


def value(rng: random.Random) -> str:
    """Draw a text value that is in no list."""
    roll = rng.random()
    if roll < 0.35:
        return " ".join(word(rng) for _ in range(rng.randint(1, 3)))
    if roll < 0.55:
        return " ".join(word(rng).capitalize() for _ in range(rng.randint(1, 3)))
    if roll < 0.65:
        return letters(rng)
    if roll < 0.8:
        return f"{name(rng)} {rng.choice((word(rng).capitalize(), rng.choice(common.SURNAMES)))}"
    if roll < 0.9:
        folders = f"/{word(rng)}/{word(rng)}/{word(rng)}"
        return f"{folders}.{rng.choice('py txt md json rs go csv yaml js'.split())}"
    return rng.choice((rng.choice(common.CITIES), rng.choice(common.COUNTRIES), common.phrase(rng)))
