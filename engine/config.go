package engine

import (
	"errors"
	"fmt"
	"time"
)

// Config holds the engine's limits. None of them changes which tokens a
// request gets, only when.
type Config struct {
	// MaxRunning is how many sequences (choices) one step carries.
	MaxRunning int
	// MaxWaiting is how many requests may wait; more are refused with ErrQueueFull.
	MaxWaiting int
	// StepTokens is the token budget of a step: decoding sequences take one each, prefill chunks
	// the rest, and a few if there is none.
	StepTokens int
	// PrefillTokens is the most that one prompt gets in a step in which nothing decodes: large
	// chunks are faster, and nobody waits for them. Less than StepTokens means StepTokens.
	PrefillTokens int
	// MaxStepTime is how long a step with a prefill chunk should take at most; the chunk adapts
	// to the measured speed. 0: StepTokens alone decides. A quarter more is allowed where it
	// spares a prompt a step, twice as long where prompts wait behind one that has waited for
	// long, four times for a step for which PrefillTokens counts.
	MaxStepTime time.Duration
	// QueueTime is how soon waiting prompt tokens are to be computed: a step beside which
	// others decode is as large as that takes, and no larger. 0: as large as StepTokens and
	// MaxStepTime allow.
	QueueTime time.Duration
	Promise   Promise
	// Speculation says whose guesses steps verify. A Backend that cannot verify gets none.
	Speculation Speculation
	// ShedLate ends prompts of which nothing is computed yet with ErrLate once what is promised of
	// their first token cannot be kept. False: they are computed behind the others.
	ShedLate bool
	// MaxBacklog is how many unread events a choice may have before it pauses.
	MaxBacklog int
	// MaxModelLen caps prompt plus output tokens; 0 means what model and pool allow.
	MaxModelLen int
	// MaxFailures is how many steps in a row fail before Health returns an error.
	MaxFailures int
	// RetractEvery preempts the youngest preemptible sequence every so many steps, for tests; 0:
	// never.
	RetractEvery int
	// EOS are the model's end-of-sequence ids.
	EOS []int32
	// Model is its name, for errors and the log.
	Model string
	// Stepped, if set, is told how many positions each step computed, and Preempted of each
	// sequence that lost its blocks. The loop waits for both.
	Stepped   func(positions int)
	Preempted func()
}

// DefaultConfig returns limits that suit a small server.
func DefaultConfig() Config {
	return Config{
		MaxRunning:  256,
		MaxWaiting:  1024,
		StepTokens:  2048,
		MaxStepTime: 50 * time.Millisecond,
		QueueTime:   50 * time.Millisecond,
		MaxBacklog:  64,
		MaxFailures: 3,
		Speculation: Speculation{Depth: DefaultDepth},
	}
}

// MostTokens is the most that a step may carry: what its backend must take.
func (c *Config) MostTokens() int {
	return max(c.StepTokens, c.PrefillTokens, c.MaxRunning+leastChunk)
}

// Gap is what steps keep to beside which others decode: the shortest of MaxStepTime and what is promised of
// gaps; 0: nothing is.
func (c *Config) Gap() (gap time.Duration) {
	for _, d := range [...]time.Duration{c.MaxStepTime, c.Promise.TPOT, c.Promise.ITL} {
		if d > 0 && (gap == 0 || d < gap) {
			gap = d
		}
	}
	return gap
}

// Validate checks the ranges.
func (c *Config) Validate() error {
	for _, f := range []struct {
		name  string
		value int
		least int
	}{
		{"max running", c.MaxRunning, 1},
		{"max waiting", c.MaxWaiting, 1},
		{"step tokens", c.StepTokens, 1},
		{"prefill tokens", c.PrefillTokens, 0},
		{"max backlog", c.MaxBacklog, 1},
		{"max model len", c.MaxModelLen, 0},
		{"max failures", c.MaxFailures, 1},
		{"max step time", int(c.MaxStepTime), 0},
		{"queue time", int(c.QueueTime), 0},
		{"speculation depth", c.Speculation.Depth, 0},
	} {
		if f.value < f.least {
			return fmt.Errorf("engine: %s is %d, want at least %d", f.name, f.value, f.least)
		}
	}
	return c.Promise.validate()
}

// Errors of Submit and of Handle.Next.
var (
	// ErrQueueFull: MaxWaiting requests wait already.
	ErrQueueFull = errors.New("engine queue is full")
	// ErrClosed: the engine is closing, or closed before the request ended.
	ErrClosed = errors.New("engine is closed")
	// ErrLate: the prompt was shed, see Config.ShedLate. Nothing was computed of it, and nobody else
	// should be asked for it: what would keep the promise elsewhere is needed there.
	ErrLate = errors.New("the promised time to the first token cannot be kept")
	// ErrCancelled: Handle.Cancel was called, or the request's context ended.
	ErrCancelled = errors.New("request was cancelled")
)

// TooLongError says that a prompt cannot fit, whatever else runs.
type TooLongError struct {
	Prompt int // tokens of the prompt
	Max    int // tokens of prompt and output together
}

func (e *TooLongError) Error() string {
	return fmt.Sprintf("prompt has %d tokens, which leaves no room for output: prompt and output may have %d together",
		e.Prompt, e.Max)
}

// RequestError says that a request is malformed: a caller's mistake.
type RequestError struct {
	Field string
	Msg   string
}

func (e *RequestError) Error() string { return fmt.Sprintf("request %s: %s", e.Field, e.Msg) }

// StepError says that the backend failed in a step that carried the request.
type StepError struct {
	Panicked bool
	Err      error
}

func (e *StepError) Error() string {
	if e.Panicked {
		return fmt.Sprintf("backend step panicked: %v", e.Err)
	}
	return fmt.Sprintf("backend step: %v", e.Err)
}

func (e *StepError) Unwrap() error { return e.Err }
