package flight

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/responses"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/kept"
	"github.com/xpyd/xpyd/router/limit"
)

// background is the responses that outlive their connections: those that wait or run, and of those that are over the
// ones whose events may be read again, or that could not be kept elsewhere. All of it is bounded by kept.Config.
type background struct {
	s *Service

	mu    sync.Mutex // guards the following, and what runs say it does; never held while calling out
	runs  map[string]*run
	over  []*run         // of runs: the one that ended first is first
	live  map[string]int // by owner, until the goroutine ends
	count int            // their sum
	bytes int64          // of inputs, events and whole responses
	left  chan struct{}  // closed when count falls
}

// run is a response in the background. It is the guise of its request, whose goroutine it runs on.
type run struct {
	b       *background
	id      string
	owner   string
	request string // its ID
	streams bool

	// b.mu guards the following.
	q       *request // nil once its goroutine has ended, as is answer
	answer  *responses.Answer
	entry   kept.Entry // its Response is nil until it is over
	pages   []page
	begins  int // the first event that is still there
	next    int // the next event
	bytes   int64
	last    []byte        // events that are told once the response is kept
	closed  bool          // no event follows
	deleted bool          // its client has forgotten it
	until   time.Time     // of one that is over: it is forgotten
	changed chan struct{} // closed with the next change
}

// page is some whole events in a row.
type page struct {
	from int // the first's number
	data []byte
}

const (
	pageBytes = 64              // of a page, beside its data
	lostAfter = 5 * time.Second // a response's deadline, so long ago, nobody is at it
)

func newBackground(s *Service) *background {
	return &background{s: s, runs: map[string]*run{}, live: map[string]int{}, left: make(chan struct{})}
}

// begin answers a request for a response in the background, which goes on without its client.
func (b *background) begin(ctx *fasthttp.RequestCtx, q *request, asked *askedResponse) {
	q.client.Unwatch(q)
	q.client = nil
	r, class, err := b.take(ctx, q, asked)
	if err != nil {
		q.refuse(ctx, err)
		return
	}
	if b.s.responses.Shared() { // other routers should know of it
		e := kept.Entry{Owner: r.owner, Before: r.entry.Before, Input: r.entry.Input, Response: r.snapshot(), Until: q.end.Add(lostAfter).Unix()}
		_ = r.stored("a response is not announced to other routers", func(ctx context.Context) error { return b.s.responses.Announce(ctx, r.id, &e) })
	}
	now := r.snapshot() // before it starts: it is queued
	if !b.s.Spawn(func() { r.fly(class) }) {
		err := openai.Unavailable("%v", ErrShutdown)
		q.settle(false)
		r.Fail(err)
		b.leave(r)
		q.refuse(ctx, err)
		return
	}
	if r.streams {
		r.tell(ctx, 0)
		return
	}
	h1.WriteJSON(ctx, 200, now)
}

// take registers a run, if there is room, and takes its request through its tenant's limits.
func (b *background) take(ctx *fasthttp.RequestCtx, q *request, asked *askedResponse) (*run, limit.Class, *openai.Error) {
	r := &run{b: b, id: asked.options.ID, owner: ownerOf(q.tenant), request: q.id, streams: asked.Stream, q: q, changed: make(chan struct{})}
	r.entry = kept.Entry{Owner: r.owner, Before: asked.before, Input: asked.input()}
	o := asked.options
	o.Background = true
	o.Keep = func(response []byte) { // b.mu is held: the answer is used with it alone
		r.entry.Response = slices.Clone(response)
	}
	r.answer = asked.Answer(o)
	if err := b.room(r); err != nil {
		return nil, 0, err
	}
	q.translated(asked.chat, r)
	class, err := q.prepare(ctx)
	if err == nil {
		_, models := b.s.Members.Served()
		if _, known := models[q.top.Model]; q.top.Model != "" && !known {
			q.settle(false)
			err = openai.ModelNotFound(q.top.Model)
		}
	}
	if err != nil {
		b.forget(r)
		b.leave(r)
		return nil, 0, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	r.add(r.answer.Queue(nil))
	return r, class, nil
}

// room registers a run if the bounds let it.
func (b *background) room(r *run) *openai.Error {
	cfg := &b.s.Deps.Responses
	if cfg.Background == 0 {
		return openai.BadRequest("background", "no response may run in the background here")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expire()
	size := int64(len(r.entry.Input)) + pageBytes
	for b.bytes+size > cfg.BackgroundBytes && len(b.over) > 0 {
		b.drop(b.over[0])
	}
	switch {
	case size > cfg.BackgroundBytes:
		return openai.TooLarge("the input has %d bytes, and all responses in the background may hold %d with what goes with them (responses.background_bytes)", len(r.entry.Input), cfg.BackgroundBytes)
	case b.count >= cfg.Background || r.owner != "" && b.live[r.owner] >= (cfg.Background+1)/2:
		return openai.TooMany("%d responses run in the background, %d of them yours; try again when one is over", b.count, b.live[r.owner])
	case b.bytes+size > cfg.BackgroundBytes:
		return openai.TooMany("responses in the background hold all the memory that they may; try again when one is over")
	}
	b.count++
	b.live[r.owner]++
	b.runs[r.id] = r
	b.grow(r, size)
	return nil
}

func (b *background) grow(r *run, n int64) {
	b.bytes += n
	r.bytes += n
}

// leave gives a run's place back.
func (b *background) leave(r *run) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count--
	if b.live[r.owner]--; b.live[r.owner] == 0 {
		delete(b.live, r.owner)
	}
	close(b.left)
	b.left = make(chan struct{})
}

// forget has nobody find a run any more.
func (b *background) forget(r *run) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.drop(r)
}

// drop forgets a run and its memory. b.mu is held, as in all that follows up to find.
func (b *background) drop(r *run) {
	if b.runs[r.id] != r {
		return
	}
	delete(b.runs, r.id)
	b.over = slices.DeleteFunc(b.over, func(o *run) bool { return o == r })
	b.grow(r, -r.bytes)
}

// expire drops what is too old.
func (b *background) expire() {
	for now := time.Now(); len(b.over) > 0 && !now.Before(b.over[0].until); {
		b.drop(b.over[0])
	}
}

// find returns an owner's run; nil if there is none.
func (b *background) find(owner, id string) *run {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expire()
	if r := b.runs[id]; r != nil && r.owner == owner && !r.deleted {
		return r
	}
	return nil
}

// counted is how many responses wait or run in the background.
func (b *background) counted() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.count
}

// Rest waits until no response runs in the background, or for the end of ctx.
func (s *Service) Rest(ctx context.Context) error {
	for {
		s.background.mu.Lock()
		n, left := s.background.count, s.background.left
		s.background.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-left:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// fly takes the request to the end of its answer.
func (r *run) fly(class limit.Class) {
	defer r.b.leave(r)
	defer r.rest()
	q := r.q
	err := q.takePlace(class, &q.top)
	var ans *answer
	if err == nil {
		r.change(func() []byte { return r.answer.Start(nil) })
		ans, err = q.fly()
	}
	if err == nil {
		ans, err = q.disguise(ans)
	}
	switch {
	case err != nil:
		q.finish(err.Status, err.Message)
		r.Fail(err)
	case ans.events == nil:
		q.finish(ans.status, "")
	default:
		q.slim()
		st := &stream{q: q, answer: ans, pace: q.pacer(ans)}
		_ = st.relay(nowhere{}) // the answer has it
	}
	r.Fail(openai.Upstream("the answer ended early")) // nothing, if it is over as it should
}

// rest lets go of what only a run that is under way needs.
func (r *run) rest() {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	r.q, r.answer = nil, nil
}

// nowhere is where the events go that a run keeps.
type nowhere struct{}

func (nowhere) Send([]byte, bool) error { return nil }

// change uses the answer, which may end with it, and notes its events.
func (r *run) change(f func() []byte) {
	r.b.mu.Lock()
	if r.answer == nil || r.answer.Over() {
		r.b.mu.Unlock()
		return
	}
	events := f()
	if !r.answer.Over() {
		r.add(events)
		r.b.mu.Unlock()
		return
	}
	r.last = events
	e := r.entry
	deleted := r.deleted
	r.b.mu.Unlock()
	lost := false
	if deleted {
		r.retract()
	} else {
		lost = r.keep(&e) != nil
	}
	r.b.mu.Lock()
	if r.deleted && !deleted && !lost { // meanwhile
		r.b.mu.Unlock()
		_ = r.stored("a deleted response is still kept", func(ctx context.Context) error { return r.b.s.responses.Delete(ctx, r.owner, r.id) })
		r.b.mu.Lock()
	}
	defer r.b.mu.Unlock()
	r.add(r.last)
	r.last, r.closed = nil, true
	if r.until = time.Now().Add(r.b.s.Deps.Responses.TTL); r.deleted || !r.streams && !lost {
		r.b.drop(r)
		return
	}
	if r.b.runs[r.id] != r { // there was no room
		return
	}
	r.b.grow(r, int64(len(e.Response)))
	r.b.over = append(r.b.over, r)
	for len(r.b.over) > r.b.s.Deps.Responses.Background {
		r.b.drop(r.b.over[0])
	}
	r.b.fit(r)
}

// keep puts an entry where responses are kept.
func (r *run) keep(e *kept.Entry) error {
	err := r.stored("a response is not kept", func(ctx context.Context) error {
		if responses.Output(e.Response) == nil {
			return errNoText
		}
		return r.b.s.responses.Put(ctx, r.id, e)
	})
	r.retract()
	return err
}

func (r *run) retract() {
	_ = r.stored("a response that is over is still announced", func(ctx context.Context) error { return r.b.s.responses.Retract(ctx, r.id) })
}

// stored does something where responses are kept, also when the request is over, and logs what fails.
func (r *run) stored(what string, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), r.b.s.Deps.Responses.RedisTimeout)
	defer cancel()
	err := do(ctx)
	if err != nil && !errors.Is(err, kept.ErrNone) {
		r.b.s.Log.Warn(what, "request_id", r.request, "response", r.id, "err", err)
	}
	return err
}

// add notes events, and drops the oldest where they take too much. b.mu is held.
func (r *run) add(events []byte) {
	if n := bytes.Count(events, []byte("\n\n")); r.streams && n > 0 {
		r.pages = append(r.pages, page{r.next, bytes.Clone(events)})
		r.next += n
		r.b.grow(r, int64(len(events))+pageBytes)
		r.b.fit(r)
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

// fit makes room: others that are over go first, then this run's oldest events. b.mu is held.
func (b *background) fit(r *run) {
	most := b.s.Deps.Responses.BackgroundBytes
	for b.bytes > most && len(b.over) > 0 && b.over[0] != r {
		b.drop(b.over[0])
	}
	n := 0
	for ; b.bytes > most && n < len(r.pages); n++ {
		b.grow(r, -int64(len(r.pages[n].data))-pageBytes)
	}
	if n == 0 {
		return
	}
	for ; n < len(r.pages)/16; n++ { // not one by one
		b.grow(r, -int64(len(r.pages[n].data))-pageBytes)
	}
	r.pages = slices.Delete(r.pages, 0, n)
	if r.begins = r.next; len(r.pages) > 0 {
		r.begins = r.pages[0].from
	}
}

// Whole implements guise, as do the following.
func (r *run) Whole(dst, body []byte) (_ []byte, err *openai.Error) {
	r.change(func() []byte {
		_, err = r.answer.Whole(nil, body)
		return nil
	})
	return dst, err
}

func (r *run) Append(dst, events []byte) []byte {
	r.change(func() []byte { return r.answer.Append(nil, events) })
	return dst
}

func (r *run) Close(dst []byte) []byte {
	r.change(func() []byte { return r.answer.Close(nil) })
	return dst
}

func (r *run) Over() bool {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	return r.answer.Over()
}

func (r *run) Failed() *openai.Error {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	return r.answer.Failed()
}

// Fail ends the response with an error, unless it is over.
func (r *run) Fail(e *openai.Error) {
	r.change(func() []byte { return r.answer.Fail(nil, e) })
}

// cancel ends the response with what there is of it, unless it is over, and returns what it is then.
func (r *run) cancel() []byte {
	r.change(func() []byte { return r.answer.Cancel(nil) })
	r.b.mu.Lock()
	q := r.q
	r.b.mu.Unlock()
	if q != nil {
		q.cancel(errCancelled)
	}
	return r.snapshot()
}

// delete has nobody find the response any more, and ends it.
func (r *run) delete() {
	r.b.mu.Lock()
	r.deleted = true
	r.b.mu.Unlock()
	r.cancel()
	r.b.forget(r)
}

// snapshot is the response as it stands.
func (r *run) snapshot() []byte {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	if r.entry.Response != nil {
		return r.entry.Response
	}
	return r.answer.Snapshot()
}

// tell answers with the response's events, those before from left out.
func (r *run) tell(ctx *fasthttp.RequestCtx, from int) {
	r.b.s.tellers.Add(1)
	t := &teller{r: r, next: from, gone: make(chan struct{})}
	h1.ConnOf(ctx.Conn()).Watch(r.b.s.Watcher, t)
	ctx.SetContentType("text/event-stream")
	ctx.Response.Header.Set("Cache-Control", "no-cache")
	ctx.Response.Header.Set("X-Accel-Buffering", "no")
	h1.ConnOf(ctx.Conn()).Stream(-1, t)
}

// teller tells a client a run's events, as they come or again.
type teller struct {
	r    *run
	next int
	once sync.Once
	gone chan struct{}
}

// Left implements h1.Leaver.
func (t *teller) Left() { t.once.Do(func() { close(t.gone) }) }

// tellBytes is about how much is told at once.
const tellBytes = 64 << 10

// Stream implements h1.Streamer. A run ends in time, and so does this.
func (t *teller) Stream(c *h1.Conn) error {
	defer t.r.b.s.tellers.Add(-1)
	defer c.Unwatch(t)
	for {
		events, over, changed := t.read()
		if err := c.Send(events, over); err != nil || over {
			return err
		}
		if len(events) > 0 {
			continue
		}
		select {
		case <-changed:
		case <-t.gone:
			return errClientGone
		}
	}
}

// read returns the next events, whether none follow, and what tells when there are more.
func (t *teller) read() (events []byte, over bool, changed <-chan struct{}) {
	r := t.r
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	if t.next < r.begins {
		return fmt.Appendf(nil, "event: error\ndata: {\"type\":\"error\",\"sequence_number\":%d,\"code\":\"events_dropped\",\"message\":\"events up to %d are not there any more\",\"param\":null}\n\n", t.next, r.begins-1), true, nil
	}
	i, _ := slices.BinarySearchFunc(r.pages, t.next+1, func(p page, next int) int { return cmp.Compare(p.from, next) })
	for i = max(i-1, 0); i < len(r.pages) && len(events) < tellBytes; i++ {
		p := r.pages[i]
		data := p.data
		for skip := t.next - p.from; skip > 0 && len(data) > 0; skip-- {
			_, data, _ = bytes.Cut(data, []byte("\n\n"))
		}
		t.next = max(t.next, p.from+bytes.Count(p.data, []byte("\n\n")))
		events = append(events, data...)
	}
	return events, r.closed && t.next >= r.next, r.changed
}
