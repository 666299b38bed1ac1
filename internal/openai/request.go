package openai

import "encoding/json"

// Limits of a request.
const (
	maxPrompts   = 256      // in one completion request
	maxN         = 128      // choices a prompt
	MaxLogprobs  = 20       // alternatives a position
	maxStops     = 16       // stop strings
	maxStopBytes = 1024     // of one stop string
	maxBias      = 1024     // entries of logit_bias, stop_token_ids, bad_words and logprob_token_ids
	maxListed    = 1 << 18  // log probabilities a position: any vocabulary
	maxAllowed   = 1 << 18  // entries of allowed_token_ids: any vocabulary
	maxSalt      = 1024     // bytes of a cache_salt
	maxTemplate  = 64 << 10 // bytes of a chat_template
)

// All as a number of log probabilities is the whole vocabulary.
const All = -1

// Fields is a set of request fields that the client gave a value. A worker takes the others
// from the model's generation config.
type Fields uint8

// The fields whose absence can matter.
const (
	GivenTemperature Fields = 1 << iota
	GivenTopP
	GivenTopK
	GivenMinP
	GivenRepetition
	GivenTokensAsIDs // the worker's default is a setting
)

// Has reports whether f was given.
func (g Fields) Has(f Fields) bool { return g&f != 0 }

// Bias is one logit_bias entry.
type Bias struct {
	ID    int32
	Value float32 // added to the logit, -100..100
}

// Sampling is what completions and chat share, with the API's defaults where the client gave no
// value.
type Sampling struct {
	Model  string // "" when absent
	User   string
	N      int // choices a prompt, >= 1
	Seed   *int64
	Stream bool

	IncludeUsage    bool // stream_options.include_usage
	ContinuousUsage bool // stream_options.continuous_usage_stats

	MaxTokens    *int // output tokens; nil: the rest of the context (chat), 16 (completions, already filled in)
	MinTokens    int
	Stop         []string
	StopTokenIDs []int32
	IncludeStop  bool // include_stop_str_in_output
	IgnoreEOS    bool
	SkipSpecial  bool // skip_special_tokens, default true

	Given       Fields
	Temperature float32 // 0..2, 1
	TopP        float32 // (0,1], 1
	MinP        float32 // [0,1], 0
	TopK        int     // 0 means the whole vocabulary
	Presence    float32 // -2..2, 0
	Frequency   float32 // -2..2, 0
	Repetition  float32 // (0,2], 1
	LogitBias   []Bias

	AllowedIDs []int32  // allowed_token_ids: nothing else is drawn; nil: anything is
	BadWords   []string // none is drawn, alone or behind a space

	PromptLogprobs *int    // prompt_logprobs: alternatives at each prompt position; All: the vocabulary
	LogprobIDs     []int32 // logprob_token_ids: listed instead of the most likely; nil: these are
	ReturnTokenIDs bool
	TokensAsIDs    bool // return_tokens_as_token_ids: log probabilities name tokens as token_id:N

	Truncate *int // truncate_prompt_tokens: of a longer prompt so many remain; -1: as many as fit; nil: it is refused
	KeepHead bool // truncation_side is right: the first remain, else the last

	CacheSalt     string // separates prefix caches
	CachePriority int    // cache_priority (0..100) minus its default of 50: KV of lower priority is evicted first

	Constraint *Constraint // nil: any text

	KVTransferParams json.RawMessage // the raw object; nil when absent or null
	Bootstrap        *Bootstrap      // nil when none of its fields is given
}

// Prompt is text or token ids.
type Prompt struct {
	Text     string
	Tokens   []int32
	IsTokens bool
}

// Completion is a POST /v1/completions body.
type Completion struct {
	Sampling
	Prompts    []Prompt // at least one
	Echo       bool
	Logprobs   *int // alternatives, or All; nil: none
	AddSpecial bool // add_special_tokens, default true
}

// Chat is a POST /v1/chat/completions body.
type Chat struct {
	Sampling
	// Messages are objects as sent, because chat templates see the order of keys and how
	// numbers are written. But a list of text parts is joined with newlines into one string,
	// and a content that is absent or null is "", as in vLLM: many templates take nothing else.
	Messages    []json.RawMessage
	Logprobs    bool
	TopLogprobs int  // alternatives, or All
	Echo        bool // the answer has the final message in front of what continues it

	Tools         json.RawMessage // array; nil when absent or empty
	ToolChoice    json.RawMessage
	OneCall       bool // parallel_tool_calls is false: only the first call is wanted
	HideReasoning bool // include_reasoning is false

	AddGenerationPrompt  bool // default true
	ContinueFinalMessage bool
	AddSpecial           bool                       // default false: templates write their own
	TemplateKwargs       map[string]json.RawMessage // chat_template_kwargs, reasoning_effort and documents
	Template             string                     // chat_template: instead of the model's; "": that one
}

// Tokenize is a POST /tokenize body: a prompt, or a chat when Chat is set.
type Tokenize struct {
	Model      string
	Prompt     string
	Chat       *Chat // messages form
	AddSpecial bool  // default true for a prompt, false for a chat
	ReturnStrs bool  // return_token_strs
}

// Detokenize is a POST /detokenize body.
type Detokenize struct {
	Model  string
	Tokens []int32
}
