"""Every known field of every dialect, and what becomes of it on each route: the one list.

Names are paths: `a.b` is a field within `a`, `a[].b` one within each item of `a`. `name=1|0` says
which values ask for nothing; null, "", [] and {} never do. See `fields.py` for how it is read and
docs/api.md for how it is shown.

Sources: OpenAI API description 2.3 and its SDK's parameters; Anthropic API reference and its SDK's
parameters (beta ones too); the request parameters of vLLM, SGLang, llama.cpp's server, mlx-lm's
server, LM Studio, Ollama, TGI, text-generation-webui, OpenRouter, DeepSeek, Mistral, xAI, "
          "DashScope.
"""

from typing import Final, Literal, NamedTuple

Verdict = Literal["served", "refused", "harmless"]
Route = Literal["chat", "text", "responses", "messages", "count", "input", "tokenize"]

ROUTES: Final[dict[Route, str]] = {
    "chat": "/v1/chat/completions",
    "text": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count": "/v1/messages/count_tokens",
    "input": "/v1/responses/input_tokens",
    "tokenize": "/v1/tokenize",
}
# A route that only counts a prompt knows the fields of the one that would answer it.
COUNTS: Final[dict[Route, Route]] = {"count": "messages", "input": "responses"}

ANSWERING: Final = "chat text responses messages"
_TALK: Final = "chat responses messages"


class Group(NamedTuple):
    """Fields with one verdict for one reason.

    Args:
        names: Paths, each perhaps with the values that ask for nothing.
        why: What a served field does, what to use instead of a refused one, or why a harmless one
            changes no answer.
        on: Routes.
        prompt: It concerns the prompt, so routes that only count one look at it too.
    """

    verdict: Verdict
    names: str
    why: str
    on: str = ANSWERING
    prompt: bool = False


def _served(names: str, why: str, on: str = ANSWERING, *, prompt: bool = False) -> Group:
    return Group("served", names, why, on, prompt)


def _refused(names: str, instead: str, on: str = ANSWERING, *, prompt: bool = False) -> Group:
    return Group("refused", names, instead, on, prompt)


def _harmless(names: str, why: str, on: str = ANSWERING) -> Group:
    return Group("harmless", names, why, on)


_SERVED: Final = (
    _served("model", "checked with strict_model", f"{ANSWERING} tokenize", prompt=True),
    _served("stream", "events instead of one body"),
    _served("temperature top_p top_k min_p seed", "sampling"),
    _served("presence_penalty frequency_penalty repetition_penalty logit_bias", "sampling"),
    _served("stop ignore_eos", "where the answer ends"),
    _served("guided_json guided_regex guided_choice guided_grammar", "the form of the answer"),
    _served("paceline", "paceline's own: priority"),
    _served("n", "choices", "chat text"),
    _served("stream_options.include_usage", "usage at a stream's end", "chat text"),
    _served("messages", "the conversation", "chat messages tokenize", prompt=True),
    _served("messages[].reasoning_content messages[].reasoning", "earlier thoughts", "chat"),
    _served("tools", "functions the model is told of", f"{_TALK} tokenize", prompt=True),
    _served("tool_choice", "which of them may or must be called", _TALK, prompt=True),
    _served("parallel_tool_calls", "false: one call at most", "chat responses"),
    _served("chat_template_kwargs", "variables of the chat template", _TALK, prompt=True),
    _served("max_tokens", "the budget", "chat text messages"),
    _served("max_completion_tokens", "the budget", "chat"),
    _served("logprobs", "log probabilities", "chat text"),
    _served("top_logprobs", "alternatives beside them", "chat responses"),
    _served("response_format", "the form of the answer", "chat"),
    _served("reasoning_effort", "a variable of the chat template", "chat"),
    _served("prompt", "the prompt", "text tokenize", prompt=True),
    _served("echo best_of", "as with OpenAI", "text"),
    _served("add_special_tokens", "false: without what opens a prompt", "text tokenize"),
    _served(
        "input instructions previous_response_id", "the conversation", "responses", prompt=True
    ),
    _served("max_output_tokens", "the budget", "responses"),
    _served("text.format", "the form of the answer", "responses"),
    _served("reasoning.effort", "a variable of the chat template", "chat responses", prompt=True),
    _served("store metadata", "kept with the response", "responses"),
    _served("include", "`message.output_text.logprobs`; nothing else is there", "responses"),
    _served("system", "instructions", "messages", prompt=True),
    _served("stop_sequences", "where the answer ends", "messages"),
    _served("thinking.type", "a variable of the chat template", "chat messages", prompt=True),
    _served("reasoning.enabled", "a variable of the chat template", "chat", prompt=True),
    _served("output_config.effort", "a variable of the chat template", "messages", prompt=True),
    _served("output_config.format", "the form of the answer", "messages"),
)

_OTHER_DIALECTS: Final = (
    _refused("max_completion_tokens", "use max_tokens", "text messages"),
    _refused("max_tokens max_completion_tokens", "use max_output_tokens", "responses"),
    _refused("max_output_tokens", "use max_tokens", "chat text messages"),
    _refused(
        "n_predict num_predict max_new_tokens max_length max_gen_len max_context_length max_new",
        "use max_tokens (max_output_tokens in Responses)",
    ),
    _refused("stop_sequences", "use stop", "chat text responses"),
    _refused("stop_conditions", "use stop (stop_sequences in Messages)"),
    _refused("n=1", "an answer of this route is one choice", "responses messages"),
    _refused("best_of=1", "use the legacy route /v1/completions", _TALK),
    _refused("echo=false", "use the legacy route /v1/completions", _TALK),
    _refused("suffix", "filling in the middle is not served"),
    _refused("text.format", "use response_format", "chat messages"),
    _refused("text.format response_format={\"type\":\"text\"} tools "
             "tool_choice=\"none\"|\"auto\" functions function_call=\"none\"|\"auto\"",
             "the legacy route has none; use /v1/chat/completions", "text"),
    _refused("response_format={\"type\":\"text\"}", "use text.format", "responses"),
    _refused("text.format.json_schema", "use text.format.schema", "responses"),
    _refused("response_format={\"type\":\"text\"} output_format", "use output_config.format",
             "messages"),
    _refused("output_config.format.json_schema", "use output_config.format.schema", "messages"),
    _refused("output_format output_config", "use response_format", "chat text"),
    _refused("output_format output_config", "use text.format and reasoning.effort", "responses"),
    _refused("format", "use response_format (text.format, output_config.format)"),
    _refused("reasoning_effort", "use reasoning.effort", "responses", prompt=True),
    _refused("reasoning_effort", "use output_config.effort", "messages", prompt=True),
    _refused("reasoning", "use output_config.effort and thinking", "messages", prompt=True),
    _refused("reasoning reasoning_effort chat_template_kwargs thinking messages system input "
             "instructions", "the legacy route takes a prompt; use /v1/chat/completions", "text"),
    _refused("think", "use thinking or reasoning_effort", "chat", prompt=True),
    _refused("thinking think", "use reasoning.effort", "responses", prompt=True),
    _refused("think", "use thinking", "messages", prompt=True),
    _refused("system instructions input", "use messages", "chat", prompt=True),
    _refused("prompt", "use messages", "chat messages", prompt=True),
    _refused("system messages", "use instructions and input", "responses", prompt=True),
    _refused("prompt", "prompt templates are not served; use input", "responses", prompt=True),
    _refused("instructions input", "use system and messages", "messages", prompt=True),
    _refused("functions function_call=\"none\"|\"auto\"", "use tools and tool_choice", _TALK,
             prompt=True),
    _refused("logprobs=false|0", "ask for message.output_text.logprobs in include", "responses"),
    _refused("logprobs=false|0 top_logprobs=0", "Messages have no log probabilities", "messages"),
    _refused("top_logprobs=0", "use logprobs", "text"),
    _refused("parallel_tool_calls=true", "use tool_choice.disable_parallel_tool_use", "messages"),
    _refused("previous_response_id conversation context", "use messages", "chat messages",
             prompt=True),
    _refused("previous_response_id conversation context", "use prompt", "text"),
    _refused("conversation context", "use previous_response_id", "responses", prompt=True),
    _refused("thread", "send the whole conversation", prompt=True),
    _refused("context_management compaction", "send the conversation as it shall be read",
             prompt=True),
    _refused("background=false", "answers are not made in the background"),
    _refused("truncation=\"disabled\"", "shorten the input; nothing is cut here", prompt=True),
    _refused("modalities=[\"text\"] audio image images image_data", "only text is served",
             prompt=True),
    _refused("prediction web_search_options moderation", "nothing here does it"),
    _refused("mcp_servers container", "run tools at the client", prompt=True),
    _refused("personality", "say it in instructions", "responses", prompt=True),
    _refused("output_config.task_budget", "use max_tokens", "messages"),
    _refused("reasoning.max_tokens reasoning.exclude=false "
             "reasoning.mode=\"auto\"|\"standard\" reasoning.context=\"auto\"",
             "use reasoning.effort and a budget for all tokens", "chat responses"),
    _refused("reasoning.enabled=true", "use reasoning.effort", "responses"),
    _refused("tools[].defer_loading=false tools[].allowed_callers=[\"direct\"] tools[].async=false",
             "tools are told of from the start and called by the model itself", _TALK, prompt=True),
    _refused("tools[].function.defer_loading=false", "tools are told of from the start", "chat",
             prompt=True),
    _refused("tools[].input_examples", "put examples into the description",
             "messages", prompt=True),
    _refused("messages[].function_call", "use tool_calls and role tool", "chat", prompt=True),
    _refused("messages[].prefix=false messages[].partial=false",
             "going on with an answer is served by /v1/messages", "chat", prompt=True),
    _refused("messages[].audio messages[].images", "only text is served", "chat", prompt=True),
)  # fmt: skip

_OTHER_SERVERS: Final = (
    _refused("min_tokens=0 min_length=0 min_new_tokens=0 min_completion_tokens=0",
             "an answer may end at any length; ignore_eos runs to the budget"),
    _refused("stop_token_ids stop_regex include_stop_str_in_output=false no_stop_trim=false "
             "ban_eos_token=false stop_strings", "stop texts are served, and are never shown"),
    _refused("bad_words banned_tokens banned_strings custom_token_bans allowed_token_ids "
             "logit_bias_exp", "use logit_bias"),
    _refused("logits_processors custom_logit_processor custom_params vllm_xargs", "use logit_bias"),
    _refused("use_beam_search=false length_penalty=1 early_stopping=false num_beams=1 "
             "diversity_penalty=0 no_repeat_ngram_size=0 penalty_alpha=0", "answers are sampled"),
    _refused("do_sample=true", "use temperature: 0 for the likeliest tokens"),
    _refused("random_seed sampling_seed", "use seed"),
    _refused("repeat_penalty=1 rep_pen=1 repetition_penalty_range=0|-1 repeat_last_n=64|-1|0 "
             "repetition_context_size=20 presence_context_size=20 frequency_context_size=20 "
             "penalty_range=0|-1 penalize_nl=false encoder_repetition_penalty=1 rep_pen_range=0",
             "use repetition_penalty, which counts the whole text"),
    _refused("typical_p=1 typical=1 typ_p=1 tfs=1 tfs_z=1 top_a=0 top_n_sigma=0|-1 "
             "epsilon_cutoff=0 eta_cutoff=0 min_keep=0 adaptive_target=-1 adaptive_decay=0.9",
             "use top_p, top_k or min_p"),
    _refused("xtc_probability=0 xtc_threshold=0.1|0 dry_multiplier=0 dry_base=1.75 "
             "dry_allowed_length=2 dry_penalty_last_n=-1|0 dry_sequence_breakers",
             "use the penalties"),
    _refused("mirostat=0 mirostat_mode=0 mirostat_tau=5 mirostat_eta=0.1 mirostat_target "
             "mirostat_lr dynatemp_range=0 dynatemp_exponent=1 dynamic_temperature=false "
             "smoothing_factor=0 smoothing_curve=1 temperature_last=false temp_last=false",
             "use temperature"),
    _refused("samplers sampler_order sampler_priority sampler_seq",
             "the order is temperature, top_k, top_p, min_p"),
    _refused("negative_prompt guidance_scale=1 cfg_scale=1 token_healing=false watermark=false",
             "nothing here does it"),
    _refused("structured_outputs structural_tag json_schema grammar grammar_lazy=false "
             "grammar_triggers grammar_string regex regex_pattern ebnf guided_decoding "
             "guided_whitespace_pattern guided_json_object=false",
             "use guided_json, guided_regex, guided_choice or guided_grammar"),
    _refused("chat_template template instruction_template documents add_generation_prompt=true "
             "continue_final_message=false response_prefix template_vars role_mapping prompt_mode "
             "thinking_forced_open=false character mode safe_prompt=false add_bos_token=true "
             "tool_prompt guideline", "the model's own chat template is used; chat_template_kwargs "
             "sets its variables, and /v1/messages goes on with a last message", prompt=True),
    _refused("add_special_tokens=false", "the chat template writes what opens a prompt", _TALK,
             prompt=True),
    _refused("prompt_embeds", "send text or token ids", prompt=True),
    _refused("n_cmpl=1", "use n; Responses and Messages are one choice"),
    _refused("n_indent=0", "say it in the prompt"),
    _refused("reasoning_effort reasoning thinking tool_choice=\"auto\" system instructions input",
             "count what would be answered with /v1/messages/count_tokens or "
             "/v1/responses/input_tokens", "tokenize"),
    _refused("truncate_prompt_tokens prompt_truncate_len truncation_length truncate=false "
             "context_length_exceeded_behavior=\"error\" n_keep=0 n_discard=0 context_shift=false",
             "shorten the prompt; nothing is cut here", prompt=True),
    _refused("num_ctx context_length max_kv_size", "the context is set when the server starts"),
    _refused("enable_thinking thinking_budget thinking_token_budget reasoning_budget "
             "thinking_budget_tokens enable_search",
             "use the route's effort, or chat_template_kwargs.enable_thinking", prompt=True),
    _refused("include_reasoning=true separate_reasoning=true "
             "reasoning_format=\"auto\"|\"deepseek\" "
             "reasoning_in_content=false reasoning_history",
             "thoughts are always told apart from the answer"),
    _refused("skip_special_tokens=true spaces_between_special_tokens=true|false "
             "return_full_text=false", "control tokens are never shown; echo repeats a prompt"),
    _refused("prompt_logprobs top_n_tokens n_probs=0 post_sampling_probs=false "
             "decoder_input_details=false details=false",
             "use logprobs; echo with logprobs scores a prompt"),
    _refused("return_token_ids=false return_tokens=false return_tokens_as_token_ids=false "
             "return_hidden_states=false return_routed_experts=false response_fields",
             "use /v1/tokenize, or the shape of the answer as it is"),
    _refused("lora lora_path lora_request adapters adapter_id", "the server serves one "
             "model as it was loaded"),
    _refused("transforms plugins preset search_parameters search_settings data_sources "
             "citation_options compound_custom", "one local model answers; nothing is searched",
             prompt=True),
    _refused("parameters inputs options options_override", "put the fields into the body itself"),
    _refused("raw=false input_prefix input_suffix input_extra", "use /v1/completions"),
    _refused("tokenizer_mode mm_processor_kwargs media_io_kwargs image_config",
             "only text is served", prompt=True),
    _refused("session_params kv_transfer_params bootstrap_host bootstrap_room id_slot",
             "the prefix bank finds what it knows by itself"),
    _refused("deferred=false t_max_predict_ms=0|-1 t_max_prompt_ms=0|-1 max_time",
             "use request_timeout_s"),
    _refused("parse_tool_calls=true", "calls are always read"),
    _refused("tokens_to_generate max_predict", "use max_tokens"),
    _refused("add_generation_prompt=true continue_final_message=false chat_template "
             "chat_template_kwargs return_token_strs=false with_pieces=false parse_special=true "
             "documents thread", "a prompt or messages are encoded as they would be answered",
             "tokenize"),
    _refused("content", "use prompt", "tokenize"),
    _refused("add_special=true", "use add_special_tokens", "tokenize"),
)  # fmt: skip

_HARMLESS: Final = (
    _harmless("user safety_identifier metadata.user_id user_profile_id workspace_id session_id "
              "client_metadata trace request_id rid extra_key inference_geo betas",
              "names the caller, not the answer"),
    _harmless("metadata", "labels for the caller's own lists", "chat text messages"),
    _harmless("store", "nothing is kept on this route", "chat text messages"),
    _harmless("service_tier speed priority billing_policy fallback_credit_token usage "
              "access_programs max_price allow_fallbacks", "there is one tier and no bill"),
    _harmless("prompt_cache_key prompt_cache_retention prompt_cache_options cache_prompt "
              "cache_control cache_salt keep_alive ttl diagnostics extra_body",
              "the prefix bank works by itself and the tokens are the same"),
    _harmless("verbosity text.verbosity",
              "local models have no such control; say it in the prompt"),
    _harmless("stream_options.include_obfuscation stream_options.continuous_usage_stats "
              "incremental_output sse_ping_interval stream_reasoning",
              "the text is the same; usage is told once, at the end"),
    _harmless("stream_options.include_usage", "usage is always told", "responses messages"),
    _harmless("timings_per_token return_progress perf_metrics_in_response debug",
              "the `paceline` object has the times"),
    _harmless("models route provider fallbacks", "the one local model answers under any name"),
    _harmless("draft_model num_draft_tokens speculative_ngram prompt_lookup_num_tokens "
              "backend_sampling data_parallel_rank n_threads num_thread num_gpu "
              "guided_decoding_backend "
              "auto_max_new_tokens", "how tokens are computed, not which"),
    _harmless("max_tool_calls", "it limits the service's own tools, of which there are none"),
    _harmless("background_options", "background itself is refused", "responses"),
    _harmless("reasoning.summary reasoning.generate_summary", "thoughts are told whole",
              "chat responses"),
    _harmless("thinking.budget_tokens thinking.display",
              "thoughts count against the budget and are told whole", "chat messages"),
    _harmless("messages[].name", "chat templates show no names", "chat"),
    _harmless("messages[].refusal messages[].annotations messages[].reasoning_details "
              "messages[].content[].cache_control", "history as SDKs send it back", "chat"),
    _harmless("messages[].content[].cache_control messages[].content[].citations "
              "messages[].content[].signature messages[].content[].caller system[].cache_control "
              "tools[].eager_input_streaming", "marks for the service's own bookkeeping",
              "messages"),
    _harmless("tools[].cache_control", "the prefix bank works by itself", "chat messages"),
    _harmless("tools[].output_schema", "templates have no place for it", "responses"),
    _harmless("tools[].external_web_access tools[].search_context_size tools[].user_location "
              "tools[].filters", "the model is not told of web_search", "responses"),
    _harmless("input[].status input[].phase input[].encrypted_content input[].caller "
              "input[].namespace", "history as SDKs send it back", "responses"),
    _harmless("response_format.json_schema.description", "the form itself binds", "chat"),
    _harmless("text.format.description", "the form itself binds", "responses"),
    _harmless("tool_choice.type tool_choice.disable_parallel_tool_use",
              "parts of a served field", "messages"),
)  # fmt: skip

GROUPS: Final = (*_SERVED, *_OTHER_DIALECTS, *_OTHER_SERVERS, *_HARMLESS)
