package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/handover"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/supervise"
	"github.com/xpyd/xpyd/router/console"
)

const (
	takeWait = 10 * time.Second // for the new process to have NATS and to accept
	endWait  = 5 * time.Second  // for a new process that is not needed to end
)

// upgrader upgrades a running `up`, or watches, in the process that took over, how the old one ends.
type upgrader struct {
	place *handover.Place
	log   *slog.Logger
	took  chan *handover.Successor // one that has taken over; holds one
	tasks sync.WaitGroup
	end   context.CancelFunc // of attempts

	mu     sync.Mutex
	ctx    context.Context //nolint:containedctx // of attempts; ends with end
	front  *front          // nil while starting
	sup    *supervise.Supervisor
	cfg    *upConfig
	status upgradeStatus
}

// newUpgrader makes it; from is nil in a process that takes over from nobody.
func newUpgrader(place *handover.Place, from *estate, cfg *upConfig, log *slog.Logger) *upgrader {
	u := &upgrader{place: place, cfg: cfg, log: log, took: make(chan *handover.Successor, 1)}
	if from != nil { // nobody can ask before that is so
		u.status = upgradeStatus{Phase: phaseLeaving, From: from.Build, To: build(), Began: from.Began}
	}
	u.ctx, u.end = context.WithCancel(context.Background())
	return u
}

// open lets upgrades begin, once the process that this one took over from, if any, has ended.
func (u *upgrader) open(f *front, sup *supervise.Supervisor, from *estate) {
	if from != nil {
		from.follow(u)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.front, u.sup = f, sup
}

// close ends an attempt under way and waits.
func (u *upgrader) close() {
	u.end()
	u.tasks.Wait()
}

func (u *upgrader) now() upgradeStatus {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.status
}

// set changes the status.
func (u *upgrader) set(change func(*upgradeStatus)) {
	u.mu.Lock()
	was := u.status.Phase
	change(&u.status)
	now := u.status
	if now.Phase != was && (now.Phase == phaseDone || now.Phase == phaseFailed) {
		u.status.Left, u.status.Took = "", time.Since(now.Began).Seconds()
		now = u.status
	}
	u.mu.Unlock()
	if now.Phase == was {
		return
	}
	if now.Phase == phaseFailed {
		u.log.Warn(now.String())
	} else {
		u.log.Info(now.String())
	}
}

// doing is the line of `xpyd status`; a failure is shown until the next attempt.
func (u *upgrader) doing() string {
	if s := u.now(); s.under() || s.Phase == phaseFailed {
		return s.String()
	}
	return ""
}

// mounts adds the upgrade's routes, and refuses the orders of others while one is under way: the new
// process would not know of them.
func (u *upgrader) mounts(others map[string]fasthttp.RequestHandler) map[string]fasthttp.RequestHandler {
	out := map[string]fasthttp.RequestHandler{
		"POST /admin/v1/upgrade": u.order,
		"GET /admin/v1/upgrade":  func(ctx *fasthttp.RequestCtx) { respond(ctx, u.now()) },
	}
	for at, serve := range others {
		if !strings.HasPrefix(at, "POST ") {
			out[at] = serve
			continue
		}
		out[at] = func(ctx *fasthttp.RequestCtx) {
			if s := u.now(); s.under() {
				fail(ctx, underWay(&s))
				return
			}
			serve(ctx)
		}
	}
	return out
}

func underWay(s *upgradeStatus) *openai.Error {
	return openai.BadRequest("", "%s; try again when it is over", s).WithStatus(409, "upgrade_under_way")
}

// order begins an upgrade, or refuses it.
func (u *upgrader) order(ctx *fasthttp.RequestCtx) {
	var o upgradeOrder
	if err := console.ReadBody(ctx, &o, false); err != nil {
		fail(ctx, err)
		return
	}
	limit := time.Duration(o.TimeoutMS) * time.Millisecond
	if o.TimeoutMS == 0 {
		limit = upgradeTimeout
	}
	if limit <= 0 || limit > upgradeMost {
		fail(ctx, openai.BadRequest("timeout_ms", "timeout_ms: %d is not in 1..3600000", o.TimeoutMS))
		return
	}
	s, err := u.begin(limit)
	if err != nil {
		fail(ctx, err)
		return
	}
	console.NoteChange(ctx, s.From, s.To)
	respond(ctx, s)
}

// begin checks the binary, and starts the attempt.
func (u *upgrader) begin(limit time.Duration) (upgradeStatus, *openai.Error) {
	u.mu.Lock()
	was := u.status
	var err *openai.Error
	switch {
	case was.under():
		err = underWay(&was)
	case u.front == nil || u.ctx.Err() != nil:
		err = openai.Unavailable("this process starts or ends")
	case u.cfg.Discovery.P2PListen != "":
		err = openai.BadRequest("", "discovery.p2p_listen is set: the engines that register there know one process, so that it cannot be handed over; stop this one and start the other")
	default:
		u.status = upgradeStatus{Phase: phaseChecking, From: build(), To: "another", Began: time.Now()}
	}
	u.mu.Unlock()
	if err != nil {
		return was, err
	}
	binary, to, cerr := u.wanted()
	if cerr != nil {
		u.mu.Lock()
		u.status = was
		u.mu.Unlock()
		return was, openai.BadRequest("", "%v", cerr)
	}
	u.set(func(s *upgradeStatus) { s.Phase, s.To = phaseStarting, to })
	s := u.now()
	u.tasks.Go(func() {
		next, err := u.attempt(binary, limit)
		if err != nil {
			u.set(func(s *upgradeStatus) { s.Phase, s.Error, s.Ends = phaseFailed, err.Error(), u.ctx.Err() != nil })
			return
		}
		u.set(func(s *upgradeStatus) { s.Phase = phaseLeaving })
		u.took <- next
	})
	return s, nil
}

// wanted is the binary that the data folder names, and its build.
func (u *upgrader) wanted() (binary, to string, err error) {
	path, err := u.front.data.Read(fileUpgrade)
	if err == nil {
		err = u.front.data.Remove(fileUpgrade)
	}
	if err != nil {
		return "", "", fmt.Errorf("which binary? `xpyd up --upgrade BINARY` says so in the data folder: %w", err)
	}
	binary = strings.TrimSpace(string(path))
	to, err = checkBinary(u.ctx, binary)
	return binary, to, err
}

// attempt starts the new process and has it take over. After an error all is as before.
func (u *upgrader) attempt(binary string, limit time.Duration) (*handover.Successor, error) {
	deadline := time.Now().Add(limit)
	files, err := u.front.lend()
	defer func() {
		for _, f := range files {
			if f.Name != handLock {
				f.File.Close()
			}
		}
	}()
	if err != nil {
		return nil, err
	}
	next, err := u.place.Start(binary, os.Args[1:], files)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(u.ctx, func() { next.Talk.Close() })
	defer stop()
	err = u.negotiate(next, deadline)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("not ready in %v", limit)
		if lacks := u.now().Left; lacks != "" {
			err = fmt.Errorf("%w: %s", err, lacks)
		}
	}
	if err == nil {
		err = u.give(next)
	}
	if err == nil {
		return next, nil
	}
	if endErr := next.End(endWait); endErr != nil {
		u.log.Debug("end the new process", "err", endErr)
	}
	switch {
	case u.ctx.Err() != nil:
		err = errors.New("the running one was stopped")
	case errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE):
		err = fmt.Errorf("the new process ended: %w; what it printed is where this process prints", cmp.Or(next.Ended(), err))
	}
	return nil, errors.Join(err, u.resume(files))
}

// resume takes NATS back from a new process that has ended.
func (u *upgrader) resume(files []handover.File) error {
	i := slices.IndexFunc(files, func(f handover.File) bool { return f.Name == handNATS })
	if i < 0 || u.front.nats != nil {
		return nil
	}
	err := u.front.wakeNATS(&u.cfg.RouterConfig, files[i].File)
	if err == nil {
		err = u.front.revoker.keep()
	}
	if err != nil {
		return fmt.Errorf("and NATS is lost: %w", err)
	}
	return nil
}

// negotiate makes the offer, and waits for the new workers, until this router may use them too.
func (u *upgrader) negotiate(next *handover.Successor, deadline time.Time) error {
	f := u.front
	o := offer{Build: build(), Began: u.now().Began, Made: f.data.Made()}
	if f.nats != nil {
		o.NATS = f.nats.ClientURL()
	}
	all := f.watcher.Snapshot()
	doing := useOf(f)
	for _, s := range u.sup.Status() {
		switch role, _ := doing(s); {
		case s.State == supervise.Draining || s.State == supervise.Stopped: // on its own
		case role == string(fleet.Prefill):
			o.Prefill++
		case role == string(fleet.Decode):
			o.Decode++
		}
		id := ofFleet{ID: s.Name}
		if m := all.Get(s.Name); m != nil {
			id.Epoch = m.Epoch
		}
		o.Workers = append(o.Workers, id)
	}
	if err := next.Send(&o); err != nil {
		return err
	}
	for {
		var w word
		if err := next.Receive(&w, deadline); err != nil {
			return err
		}
		switch {
		case w.Failed != "":
			return errors.New(openai.Clip(w.Failed))
		case len(w.Ready) > 0:
			return u.know(w.Ready, deadline)
		}
		u.set(func(s *upgradeStatus) { s.Left = openai.Clip(w.Lacks) })
	}
}

// know waits until this router may give its streams to the new workers.
func (u *upgrader) know(ids []string, deadline time.Time) error {
	ctx, cancel := context.WithDeadline(u.ctx, deadline)
	defer cancel()
	tick := time.NewTicker(leaveLook)
	defer tick.Stop()
	for {
		lacks := ""
		all := u.front.watcher.Snapshot()
		for _, id := range ids {
			if m := all.Get(id); m == nil || !u.front.router.Members.Serves(m) {
				lacks = openai.Clip(id) + ": not probed by the running router yet"
			}
		}
		if lacks == "" {
			return nil
		}
		u.set(func(s *upgradeStatus) { s.Left = lacks })
		select {
		case <-tick.C:
		case <-ctx.Done():
			return os.ErrDeadlineExceeded
		}
	}
}

// give gives the new process first NATS and then, if it has that, all the rest. The last message
// decides: what comes after it cannot fail here.
func (u *upgrader) give(next *handover.Successor) error {
	u.set(func(s *upgradeStatus) { s.Phase, s.Left = phaseTaking, "" })
	u.front.restNATS()
	if err := next.Send(&word{Take: true}); err != nil {
		return err
	}
	var w word
	if err := next.Receive(&w, time.Now().Add(takeWait)); err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	if !w.Took {
		return fmt.Errorf("take over: %s", openai.Clip(w.Failed))
	}
	if err := next.Send(&word{Yours: true}); err != nil {
		return err
	}
	if err := u.front.router.Leave(); err != nil {
		u.log.Warn("stop accepting", "err", err)
	}
	return nil
}
