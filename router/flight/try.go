package flight

import (
	"errors"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
	"github.com/xpyd/xpyd/router/sense"
)

// Try implements sense.Trier: a probe is a marked request that is bound to its pair.
func (s *Service) Try(pr *sense.Pair, path, fields string) error {
	q := s.newRequest(h1.RequestID(nil), "POST", path, true)
	q.setModel(pr.Decode.Model, false)
	q.body = openai.AppendString([]byte(`{"model":`), pr.Decode.Model)
	q.body = append(append(append(q.body, ','), fields...), '}')
	q.deadline(s.Members.ProbeTimeout)
	var serr *openai.Error
	if q.top, serr = openai.Scan(q.body); serr != nil {
		q.finish(serr.Status, serr.Message)
		return serr
	}
	members := make([]fleet.Member, 0, 2)
	for _, m := range pr.Members() {
		members = append(members, *m)
	}
	view := pick.View{Snapshot: fleet.NewSnapshot(pr.Version, time.Time{}, members)}
	// With a picker of its own, probes count neither as load nor as choices.
	own := pick.New(pick.Config{Policy: pick.RoundRobin}, nil)
	choice, err := own.Pick(view, &pick.Request{Model: pr.Decode.Model})
	if err != nil {
		q.finish(503, err.Error())
		return err
	}
	a := q.newAttempt(choice, pr.Version)
	ans, f := a.generate()
	switch {
	case f != nil:
		err = f.probe()
	case ans.status != 200:
		err = fmt.Errorf("status %d: %s", ans.status, openai.ErrorMessage(ans.body))
	default: // prefill must have passed too
		select {
		case <-a.pDone:
			err = a.prefillError()
		case <-q.ctx.Done(): // its leg may linger
			err = (&failure{by: a.p, err: q.ctx.Cause()}).probe()
		}
	}
	q.finish(200, "")
	return err
}

// prefillError is why prefill's leg failed; nil if it did not.
func (a *attempt) prefillError() error {
	state := a.p.record().State
	if state == legDone || state == legUnused {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return (&failure{by: a.p, outcome: a.outcome, err: fmt.Errorf("its leg ended %s %s", state, a.outcome)}).probe()
}

// probe is the failure in the prober's terms.
func (f *failure) probe() error {
	return &sense.ProbeError{Err: f, Status: f.status, Full: f.outcome == ticket.NoSpace, Refuses: errors.Is(f.err, sense.ErrRefusesUs), Shortage: f.reason == reasonShortage}
}
