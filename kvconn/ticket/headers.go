package ticket

// Headers of the requests that our router sends to our workers, and of their answers.
const (
	HeaderRequestID    = "x-request-id"
	HeaderLink         = "x-xpyd-link"          // a Link, in 32 hex digits
	HeaderPrefill      = "x-xpyd-prefill"       // the prefill worker's id
	HeaderPrefillEpoch = "x-xpyd-prefill-epoch" // decimal
	HeaderPrefillKV    = "x-xpyd-prefill-kv"    // host:port of its kvconn
	HeaderSeed         = "x-xpyd-seed"          // decimal int64; used when the body has none
	HeaderDeadline     = "x-xpyd-deadline-ms"   // milliseconds left, so that clocks need not agree
	HeaderProbe        = "x-xpyd-probe"         // "1": the router's own probe, not user traffic; it overtakes waiting requests
	HeaderOutcome      = "x-xpyd-outcome"       // an Outcome, on failures
	HeaderPrompt       = "x-xpyd-prompt"        // of answers: tokens of the prompt, and how many of them were cached
	HeaderMaxAnswer    = "x-xpyd-max-answer"    // bytes that the router takes of an answer that does not stream
	HeaderPeer         = "x-xpyd-kv-peer"       // a Peer that has more of the prompt
	HeaderTokens       = "x-xpyd-tokens"        // "1": each event says which tokens it stands for
	HeaderGiven        = "x-xpyd-given"         // decimal: the body's part that is the client's; an openai.Given follows
	HeaderBrought      = "x-xpyd-brought"       // "1": the prompt's KV was brought ahead, so decode goes on alone
	HeaderPromise      = "x-xpyd-promise"       // "ttft=200ms,tpot=25ms,itl=50ms", or some of them: what the request is promised
	HeaderCacheSalt    = "x-xpyd-cache-salt"    // whose cache it is, beside the body's cache_salt; of all who send none: the same
)
