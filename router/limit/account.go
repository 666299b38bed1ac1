package limit

import (
	"sync"
	"time"
)

// Rates are what one key may use; 0 does not limit.
type Rates struct {
	Requests int64 // a minute
	Tokens   int64 // a minute, prompt and output
	InFlight int   // at once, including waiting ones
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

// NewAccount returns an account that has used nothing.
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
	OverSize     = "size" // more tokens than a minute has: it can never succeed
)

// Over is why nothing was taken.
type Over struct {
	What  string
	Limit int64
	After time.Duration // until it may be tried again; 0: unknown
}

// Take counts a request of so many tokens as running. If it returns nil, the caller calls
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

// Release ends a request that used so many more tokens than taken, fewer if negative; ran
// is how long it took.
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

// Levels returns those of both buckets.
func (a *Account) Levels(now time.Time) (requests, tokens Level) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.requests.Level(now), a.tokens.Level(now)
}

// Bucket is a token bucket. It holds at most a minute's worth, fills evenly, and can be
// overdrawn by what becomes known only afterwards. The zero value limits nothing.
type Bucket struct {
	perMinute float64
	level     float64
	at        time.Time
}

// NewBucket returns a full bucket; 0 a minute limits nothing.
func NewBucket(now time.Time, perMinute int64) Bucket {
	return Bucket{perMinute: float64(perMinute), level: float64(perMinute), at: now}
}

// Set changes the rate; what was used stays used.
func (b *Bucket) Set(now time.Time, perMinute int64) {
	if b.perMinute == 0 {
		*b = NewBucket(now, perMinute)
		return
	}
	b.fill(now)
	b.level += float64(perMinute) - b.perMinute
	b.perMinute = float64(perMinute)
}

func (b *Bucket) fill(now time.Time) {
	if d := now.Sub(b.at); d > 0 {
		b.level = min(b.level+b.perMinute*d.Minutes(), b.perMinute)
		b.at = now
	}
}

// Limited reports whether it limits anything.
func (b *Bucket) Limited() bool { return b.perMinute > 0 }

// Wait is how long until n, at most a minute's worth, can be taken; 0: now.
func (b *Bucket) Wait(now time.Time, n float64) time.Duration {
	if !b.Limited() {
		return 0
	}
	b.fill(now)
	return b.until(n)
}

func (b *Bucket) until(n float64) time.Duration {
	if b.level >= n {
		return 0
	}
	return max(time.Duration((n-b.level)/b.perMinute*float64(time.Minute)), 1)
}

// Add takes n out even if it is not there, or puts -n back.
func (b *Bucket) Add(now time.Time, n float64) {
	if b.Limited() {
		b.fill(now)
		b.level = min(b.level-n, b.perMinute)
	}
}

// Level is a bucket's limit a minute, what is left, and the time until it is full.
type Level struct {
	Limit, Left int64
	Full        time.Duration
}

// Level returns the bucket's; Limit 0 limits nothing.
func (b *Bucket) Level(now time.Time) Level {
	if !b.Limited() {
		return Level{}
	}
	b.fill(now)
	return Level{Limit: int64(b.perMinute), Left: max(int64(b.level), 0), Full: b.until(b.perMinute)}
}
