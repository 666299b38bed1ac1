package worker

import (
	"bufio"
	"context"
	"errors"
	"math"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

// SGLang's routers send the same request to prefill and decode at once, and answer with decode's
// answer. A room, a number that the router draws, names each prompt's handover. Prefill runs the prompt
// and keeps its blocks as a lease of that room; decode asks prefill's bootstrap address, which is its
// HTTP listener, where its KV listener is, and claims the room there. Which side a worker is, its role
// says.

// meeting is where prefill and decode meet.
type meeting struct {
	addr  string  // prefill's bootstrap address
	rooms []int64 // one a prompt
}

const fieldRoom, fieldHost, fieldPort = "bootstrap_room", "bootstrap_host", "bootstrap_port"

// meeting reads a job's bootstrap fields; nil if it has none.
func (j *job) meeting() (*meeting, error) {
	b := j.Bootstrap
	if b == nil {
		return nil, nil
	}
	rooms, err := roomsOf(b.Rooms, len(j.items), j.N)
	switch {
	case err != nil:
		return nil, err
	case j.KVTransferParams != nil:
		return nil, openai.BadRequest(fieldTransfer, "kv_transfer_params and bootstrap_room exclude each other")
	case len(b.Hosts) != 1 && len(b.Hosts) != len(b.Rooms):
		return nil, openai.BadRequest(fieldHost, "%d hosts for %d rooms", len(b.Hosts), len(b.Rooms))
	case len(b.Ports) == 0:
		return nil, openai.BadRequest(fieldPort, "bootstrap_port is null: tell the router the port of prefill's HTTP listener as its bootstrap port")
	case len(b.Ports) != 1 && len(b.Ports) != len(b.Rooms):
		return nil, openai.BadRequest(fieldPort, "%d ports for %d rooms", len(b.Ports), len(b.Rooms))
	}
	host, port := b.Hosts[0], b.Ports[0]
	for _, h := range b.Hosts {
		if h != host || h == "" {
			return nil, openai.BadRequest(fieldHost, "the prompts of a request have one prefill; its host is %q and %q", openai.Clip(host), openai.Clip(h))
		}
	}
	for _, p := range b.Ports {
		if p != port || p == 0 {
			return nil, openai.BadRequest(fieldPort, "the prompts of a request have one prefill; its port is %d and %d", port, p)
		}
	}
	if inner, ok := strings.CutPrefix(host, "["); ok { // as SGLang's router writes an IPv6 address
		host = strings.TrimSuffix(inner, "]")
	}
	return &meeting{net.JoinHostPort(host, strconv.Itoa(port)), rooms}, nil
}

// roomsOf are the rooms of so many prompts of n choices each. As with SGLang one room for several
// prompts is the first of a row, and a list may name each choice of a prompt, where the first counts.
func roomsOf(given []int64, prompts, n int) ([]int64, error) {
	switch {
	case len(given) == 0:
		return nil, openai.BadRequest(fieldRoom, "bootstrap_room is missing, and without it prefill and decode do not meet")
	case prompts == 1 && (len(given) == 1 || len(given) == n):
		return given[:1], nil
	case len(given) == 1:
		if given[0] > math.MaxInt64-int64(prompts) {
			return nil, openai.BadRequest(fieldRoom, "%d prompts have the rooms from %d on, which is more than there are", prompts, given[0])
		}
		rooms := make([]int64, prompts)
		for i := range rooms {
			rooms[i] = given[0] + int64(i)
		}
		return rooms, nil
	case len(given) != prompts:
		return nil, openai.BadRequest(fieldRoom, "%d rooms for %d prompts", len(given), prompts)
	}
	seen := make(map[int64]bool, len(given))
	for _, r := range given {
		if seen[r] {
			return nil, openai.BadRequest(fieldRoom, "room %d is of two prompts", r)
		}
		seen[r] = true
	}
	return given, nil
}

// roomLease is the id of a room's lease.
func roomLease(room int64) string { return prefill.EarlyRoom + strconv.FormatInt(room, 10) }

// firstOnly makes a job that of prefill, whose answer nobody reads: it ends with the first token.
func (j *job) firstOnly() {
	if one := 1; j.MaxTokens == nil || *j.MaxTokens > one {
		j.MaxTokens = &one
	}
	j.MinTokens = 0
}

// serveRooms is prefill's side: it runs the prompts, keeps each in its room, and answers with the first
// tokens, in the form that the client asked for. Decode may be waiting in the rooms. If one prompt
// fails the others end, and decode hears of it.
func (w *Worker) serveRooms(ctx *fasthttp.RequestCtx, c *call, j *job, m *meeting, enc *openai.Encoder, id string, seed uint64) (any, error) {
	run, cancel := context.WithCancelCause(c)
	defer cancel(nil)
	kept := make([]*prefill.Kept, len(j.items))
	var wg sync.WaitGroup
	for i := range j.items {
		wg.Go(func() {
			var err error
			if kept[i], err = w.prefill.Keep(run, w.request(j, i, id, seed), roomLease(m.rooms[i])); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	if err := context.Cause(run); err != nil {
		if c.Err() != nil {
			err = failed(ticket.Cancelled, context.Cause(c))
		}
		return nil, roomFailure(err)
	}
	var usage openai.Usage
	var choices []*choice
	for i := range j.items {
		it := &j.items[i]
		it.info = &kept[i].Info
		usage.Prompt += it.info.Tokens
		usage.Cached += it.info.CachedTokens
		for n := range kept[i].First {
			one := newChoice(w, j, it, i*j.N+n)
			one.addToken(&kept[i].First[n])
			choices = append(choices, one)
			usage.Completion++
		}
	}
	if !j.Stream {
		list := make([]openai.Choice, len(choices))
		for i, one := range choices {
			list[i] = one.takeChunk()
		}
		return enc.AppendFull(nil, list, usage), nil
	}
	ctx.SetContentType("text/event-stream; charset=utf-8")
	c.stream(ctx, func(out *bufio.Writer) {
		var buf []byte
		for _, one := range choices {
			buf = appendChoice(buf, enc, one)
		}
		if j.IncludeUsage {
			buf = enc.AppendUsage(buf, usage)
		}
		_, _ = out.Write(openai.AppendDone(buf)) // a router that left reads nothing
	})
	return nil, nil
}

// appendChoice adds the events of a choice that has ended.
func appendChoice(buf []byte, enc *openai.Encoder, c *choice) []byte {
	add := func(out openai.Choice) { buf = enc.AppendChunk(buf, &out, nil) }
	if c.opens() {
		add(c.takeOpening())
	}
	closes := c.closes()
	if !closes || !c.empty() {
		out := c.takeChunk()
		if closes {
			out.Finish, out.StopString, out.StopToken, out.End = "", "", 0, false
		}
		add(out)
	}
	if closes {
		add(c.takeEnd())
	}
	return buf
}

// roomFailure is keepFailure of a room.
func roomFailure(err error) error {
	if errors.Is(err, prefill.ErrLeaseExists) {
		return openai.BadRequest(fieldRoom, "%v", err)
	}
	if f := (*failure)(nil); errors.As(err, &f) {
		return f
	}
	return keepFailure(err)
}

// roomOrigin is decode's side: where the rooms are. It is nil if nobody answers there, and the prompts
// are computed here.
func (w *Worker) roomOrigin(ctx context.Context, m *meeting) (*origin, error) {
	if err := w.allowPeer(m.addr); err != nil {
		return nil, openai.BadRequest(fieldHost, "%v", err)
	}
	from, err := w.bootstrapOrigin(ctx, &url.URL{Scheme: w.scheme(), Host: m.addr}, nil)
	if f := (*failure)(nil); errors.As(err, &f) {
		for _, room := range m.rooms {
			w.met("", room, err)
		}
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	from.rooms = m.rooms
	return from, w.checkOrigin(from)
}

// newRoomMetric makes what met counts with.
func newRoomMetric() *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "xpyd_worker_rooms_total",
		Help: "Prompts that decode was to collect from a bootstrap_room, by outcome. done: collected. All others were computed here: dead, late and no_space are of prefill's worker, refused of another prompt in the room."}, []string{"outcome"})
	for _, o := range []ticket.Outcome{ticket.Done, ticket.Dead, ticket.Late, ticket.NoSpace, ticket.Refused, ticket.Corrupt, ticket.Incompatible, ticket.Cancelled, ticket.Invalid, ticket.Shed} {
		v.WithLabelValues(string(o))
	}
	return v
}

// met counts how the handover in a room ended.
func (w *Worker) met(requestID string, room int64, err error) {
	outcome := ticket.Done
	if err != nil {
		outcome = ticket.Dead
		if e := (*decode.Error)(nil); errors.As(err, &e) {
			outcome = e.Outcome
		} else if f := (*failure)(nil); errors.As(err, &f) {
			outcome = f.outcome
		}
		w.log.Warn("a prompt is computed here: it could not be collected from prefill", "request_id", requestID, "room", room, "outcome", string(outcome), "error", err)
	}
	w.rooms.WithLabelValues(string(outcome)).Inc()
}
