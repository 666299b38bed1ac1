package limit

import "time"

// Bucket is a token bucket: it holds at most a minute's worth, fills evenly,
// and may be overdrawn by what was only known afterwards. The zero value
// limits nothing.
type Bucket struct {
	perMinute float64
	level     float64
	at        time.Time
}

// NewBucket returns a full one; 0 a minute limits nothing.
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

// Wait is how long it takes until n can be taken; 0 is now. n is at most a
// minute's worth.
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

// Add takes n out, whether it is there or not, or puts -n back.
func (b *Bucket) Add(now time.Time, n float64) {
	if b.Limited() {
		b.fill(now)
		b.level = min(b.level-n, b.perMinute)
	}
}

// Level is what a bucket has: the limit a minute, what is left, and how long
// until it is full again.
type Level struct {
	Limit, Left int64
	Full        time.Duration
}

// Level tells; Limit 0 limits nothing.
func (b *Bucket) Level(now time.Time) Level {
	if !b.Limited() {
		return Level{}
	}
	b.fill(now)
	return Level{Limit: int64(b.perMinute), Left: max(int64(b.level), 0), Full: b.until(b.perMinute)}
}
