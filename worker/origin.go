package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// origin is where the KV of a request's prompts comes from.
type origin struct {
	addr      string
	peer      kvconn.PeerID
	link      ticket.Link
	leaseID   string
	requestID string
	deadline  time.Time
	peers     []ticket.Peer // besides the pair
	rooms     []int64       // one a prompt, instead of a lease; what cannot be had there is computed here
}

// claim is what decode asks of prefill for prompt i of n, whose answers bound binds.
func (from *origin) claim(r *engine.Request, bound *handoff.Guide, i, n int) *decode.Claim {
	leaseID := from.leaseID
	if from.rooms != nil {
		leaseID = roomLease(from.rooms[i])
	}
	return &decode.Claim{
		Addr: from.addr, Peer: from.peer, Link: from.link, LeaseID: leaseID, RequestID: from.requestID,
		Owner: r.Owner, Tokens: r.Prompt, Deadline: from.deadline,
		Order: handoff.Order{Sampling: r.Sampling, N: max(r.N, 1), Urgent: r.Urgent, TTFT: r.Promise.TTFT, MayShed: !r.Keep && len(r.Given) == 0, MinTokens: r.MinTokens, StopTokens: r.StopTokens,
			IgnoreEOS: r.IgnoreEOS, Logprobs: r.Logprobs, PromptLogprobs: r.PromptLogprobs, LogprobIDs: r.LogprobIDs, Salt: r.Salt, Priority: r.Priority, Peers: from.peers, Rows: r.RowsDo(), Guide: bound, Index: i, Of: n},
	}
}

// originOf reads where a request's KV comes from; nil if it is computed here.
func (w *Worker) originOf(ctx context.Context, h *fasthttp.RequestHeader, p *transferParams, m *meeting) (*origin, error) {
	if link := h.Peek(ticket.HeaderLink); len(link) > 0 {
		return w.routerOrigin(h, string(link))
	}
	if m != nil {
		return w.roomOrigin(ctx, m)
	}
	if p == nil || !p.DoRemotePrefill {
		return nil, nil
	}
	return w.foreignOrigin(ctx, p)
}

func (w *Worker) routerOrigin(h *fasthttp.RequestHeader, raw string) (*origin, error) {
	link, err := ticket.ParseLink(raw)
	if err != nil {
		return nil, openai.BadRequest(ticket.HeaderLink, "%v", err)
	}
	from := &origin{link: link, addr: string(h.Peek(ticket.HeaderPrefillKV)),
		peer: kvconn.PeerID{ID: string(h.Peek(ticket.HeaderPrefill))}}
	if from.peer.Epoch, err = strconv.ParseUint(string(h.Peek(ticket.HeaderPrefillEpoch)), 10, 64); err != nil {
		return nil, openai.BadRequest(ticket.HeaderPrefillEpoch, "%v", err)
	}
	if ms := string(h.Peek(ticket.HeaderDeadline)); ms != "" {
		n, err := strconv.ParseInt(ms, 10, 64)
		if err != nil || n <= 0 {
			return nil, openai.BadRequest(ticket.HeaderDeadline, "%q is not a positive number of milliseconds", ms)
		}
		from.deadline = time.Now().Add(milliseconds(n))
	}
	if err := w.refuseRevoked(from.peer.ID); err != nil {
		return nil, err
	}
	if err := w.allowPeer(from.addr); err != nil {
		// The router knows it and we do not, or not yet: another pair may work.
		return nil, failed(ticket.Incompatible, err)
	}
	return from, nil
}

// allowPeer refuses addresses that a request has no business naming. Allowed are the hosts of the
// fleet's workers, this machine, and the configured hosts.
//
// Another user may listen on such a host. He gets no ticket and no prompt, and nothing of his is
// used: in kvconn's handshake both ends prove that they know the fleet's secret before the first
// frame. A worker that trusts everyone has given that up.
func (w *Worker) allowPeer(addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("%q is not host:port", addr)
	}
	if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() ||
		slices.Contains(w.cfg.AllowHosts, host) || w.fleet.knows(addr) {
		return nil
	}
	return fmt.Errorf("%s is not a worker of this fleet, nor in allow_hosts", addr)
}

// servePrefillLeg is the router's leg to prefill. It answers when the link's prompt has been pushed
// or has failed. When the router hangs up, the push ends too.
func (w *Worker) servePrefillLeg(ctx *fasthttp.RequestCtx) (any, error) {
	var leg struct {
		Link       string `json:"link"`
		RequestID  string `json:"request_id"`
		DeadlineMS int64  `json:"deadline_ms"` // from now; 0: none
	}
	if err := json.Unmarshal(ctx.PostBody(), &leg); err != nil {
		return nil, openai.BadRequest("", "%v", err)
	}
	link, err := ticket.ParseLink(leg.Link)
	if err != nil {
		return nil, openai.BadRequest("link", "%v", err)
	}
	if leg.DeadlineMS < 0 {
		return nil, openai.BadRequest("deadline_ms", "deadline_ms is %d", leg.DeadlineMS)
	}
	c, err := w.begin(ctx, w.requests, "prefill", leg.RequestID)
	if err != nil {
		return nil, err
	}
	defer c.leave()
	var wait context.Context = c
	if leg.DeadlineMS > 0 {
		var cancel context.CancelFunc
		wait, cancel = context.WithTimeout(c, milliseconds(leg.DeadlineMS))
		defer cancel()
	}
	report := w.prefill.Await(wait, link)
	if report.Outcome == ticket.Done {
		return report, nil
	}
	ctx.Response.Header.Set(ticket.HeaderOutcome, string(report.Outcome))
	writeJSON(ctx, legStatus(report.Outcome), report)
	return nil, nil
}

func legStatus(o ticket.Outcome) int {
	switch o {
	case ticket.NoSpace, ticket.Shed:
		return 503
	case ticket.Late:
		return 504
	case ticket.Cancelled:
		return 499
	}
	return 502
}

// milliseconds is a duration that a peer named, cut to a day.
func milliseconds(n int64) time.Duration {
	return time.Duration(min(n, int64(24*time.Hour/time.Millisecond))) * time.Millisecond
}
