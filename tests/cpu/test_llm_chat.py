from negamax import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "What is 47 + 38?"}]


def test_stop_strings_of_chats_count_in_the_content_only() -> None:
    with LLM("nano", num_threads=1, max_model_len=512) as llm:

        def said(*stop: str, **options: bool) -> tuple[str | None, str | None, int | str | None]:
            params = SamplingParams(temperature=0, stop=stop, **options)  # type: ignore[arg-type]
            (choice,) = llm.chat(QUESTION, params)[0].outputs
            assert choice.message is not None and choice.finish_reason == "stop"
            return choice.message.reasoning, choice.message.content, choice.stop_reason

        reasoning, content, _ = said()
        assert reasoning and content and "8" in reasoning and "85" in content
        assert said("8", "absent") == (reasoning, content.partition("8")[0], "8")
        kept = content.partition("5")[0] + "5"
        assert said("5", include_stop_str_in_output=True) == (reasoning, kept, "5")
        prompt = llm.render(QUESTION, add_generation_prompt=True)
        (whole,) = llm.generate(prompt, SamplingParams(temperature=0, stop=("8",)))
        assert "8" not in whole.outputs[0].text and whole.outputs[0].stop_reason == "8"
