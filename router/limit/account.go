package limit

import (
	"sync"
	"time"
)

// Rates are what one key may use; 0 limits nothing.
type Rates struct {
	Requests int64 // a minute
	Tokens   int64 // a minute, prompt and output
	InFlight int   // at once, waiting ones too
}

// Limits reports whether anything is limited.
func (r Rates) Limits() bool { return r != Rates{} }

// Account is what one key has used.
type Account struct {
	mu       sync.Mutex
	rates    Rates
	requests Bucket
	tokens   Bucket
	running  int
	took     float64 // mean seconds of a request; recent ones count more
}

// NewAccount returns one that has used nothing.
func NewAccount(now time.Time, r Rates) *Account {
	return &Account{rates: r, requests: NewBucket(now, r.Requests), tokens: NewBucket(now, r.Tokens)}
}

// Set changes the rates; what was used stays used.
func (a *Account) Set(now time.Time, r Rates) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rates = r
	a.requests.Set(now, r.Requests)
	a.tokens.Set(now, r.Tokens)
}

// What an account can run out of.
const (
	OverRequests = "requests"
	OverTokens   = "tokens"
	OverInFlight = "in_flight"
	OverSize     = "size" // more tokens than a minute has: it can never be taken
)

// Over is why nothing was taken.
type Over struct {
	What  string
	Limit int64
	After time.Duration // until it may be tried again; 0 is unknown
}

// Take counts a request of so many tokens as running. Who gets nil calls
// Release once.
func (a *Account) Take(now time.Time, tokens float64) *Over {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := &a.rates
	switch {
	case r.Tokens > 0 && tokens > float64(r.Tokens):
		return &Over{What: OverSize, Limit: r.Tokens}
	case r.InFlight > 0 && a.running >= r.InFlight:
		each := a.took / float64(r.InFlight)
		return &Over{What: OverInFlight, Limit: int64(r.InFlight), After: time.Duration(each * float64(time.Second))}
	}
	wait, over := a.requests.Wait(now, 1), &Over{What: OverRequests, Limit: r.Requests}
	if w := a.tokens.Wait(now, tokens); w > wait {
		wait, over = w, &Over{What: OverTokens, Limit: r.Tokens}
	}
	if wait > 0 {
		over.After = wait
		return over
	}
	a.requests.Add(now, 1)
	a.tokens.Add(now, tokens)
	a.running++
	return nil
}

// Release ends a request for which more tokens were used than taken, fewer if
// negative; ran is how long it took.
func (a *Account) Release(now time.Time, more float64, ran time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.running--
	a.tokens.Add(now, more)
	const newest = 0.1
	if a.took == 0 {
		a.took = ran.Seconds()
	}
	a.took += newest * (ran.Seconds() - a.took)
}

// Levels of both buckets.
func (a *Account) Levels(now time.Time) (requests, tokens Level) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.requests.Level(now), a.tokens.Level(now)
}

// Running is how many requests were taken and not released.
func (a *Account) Running() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.running
}
