package planner

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// order is a decision that the samples do not show yet.
type order struct {
	kind   Kind
	role   Role
	worker string
	gpus   int
	until  time.Time // then it counts as lost
}

// unseen is how long an order may take to show.
const unseen = time.Minute

// arrived ends one order to start a worker of a role.
func (p *Planner) arrived(r Role) {
	if i := slices.IndexFunc(p.orders, func(o order) bool { return o.kind == Start && o.role == r }); i >= 0 {
		p.orders = slices.Delete(p.orders, i, i+1)
	}
}

// settle drops the orders that are carried out, and those that are lost.
func (p *Planner) settle(now time.Time) {
	p.orders = slices.DeleteFunc(p.orders, func(o order) bool {
		if o.kind == Start {
			return now.After(o.until)
		}
		w := p.worker(o.worker)
		switch {
		case w == nil:
			return true
		case o.kind == Flip && w.Role == o.role && w.State != Draining:
			return true
		case w.State == Draining:
			return o.kind == Stop
		}
		return now.After(o.until)
	})
}

func (p *Planner) worker(id string) *Worker {
	for i := range p.last.Workers {
		if p.last.Workers[i].ID == id {
			return &p.last.Workers[i]
		}
	}
	return nil
}

// Decide returns what is to be done now, in this order. What an acting planner decides counts as begun.
func (p *Planner) Decide(now time.Time) []Decision {
	if p.at.IsZero() {
		return nil
	}
	if now.Sub(p.looked) >= grain {
		p.looked = now
		for _, r := range p.roles() {
			p.pools[r].judge(now, p.cfg.bounds(r), p.aim, p.start+grain, p.output.ratio(), p.prompt.ratio())
		}
	}
	have, used := p.has()
	wanted := p.fit(have)
	for r, l := range p.pools {
		l.fits = wanted[r]
	}
	if !p.acts {
		return p.advise(now, wanted)
	}
	return p.act(now, have, wanted, used)
}

// has is how many workers of each role there are once all orders are carried out, and how many GPUs
// are taken until then.
func (p *Planner) has() (have map[Role]int, used int) {
	have = map[Role]int{}
	for i := range p.last.Workers {
		w := &p.last.Workers[i]
		used += max(1, w.GPUs)
		if w.State != Draining {
			have[w.Role]++
		}
	}
	for _, o := range p.orders {
		w := p.worker(o.worker)
		switch o.kind {
		case Start:
			have[o.role]++
			used += o.gpus
		case Stop:
			have[w.Role]--
		case Flip:
			have[o.role]++
			if w.State != Draining {
				have[w.Role]--
			}
		}
	}
	return have, used
}

// fit is what is wanted within the budget: if it is too small, each role lacks about the same part. What is there
// stays as it is unless that is clearly worse.
func (p *Planner) fit(have map[Role]int) map[Role]int {
	want, gpus := map[Role]int{}, 0
	for r, l := range p.pools {
		want[r] = l.wanted
		gpus += l.wanted * l.gpus
	}
	if gpus <= p.cfg.Budget {
		return want
	}
	lack := func(n map[Role]int) (most float64) {
		for r, l := range p.pools {
			most = max(most, l.need/float64(max(1, n[r])))
		}
		return most
	}
	for bounded := true; gpus > p.cfg.Budget; {
		var from *pool
		least := 0.0
		for _, r := range p.roles() {
			l := p.pools[r]
			if want[r] <= 1 || bounded && want[r] <= p.cfg.bounds(r).Min {
				continue
			}
			if then := l.need / float64(want[r]-1); from == nil || then < least {
				from, least = l, then
			}
		}
		if from == nil && bounded { // the budget is stricter than the bounds
			bounded = false
			continue
		}
		if from == nil {
			break
		}
		want[from.role]--
		gpus -= from.gpus
	}
	now := 0
	for r, l := range p.pools {
		now += have[r] * l.gpus
		if b := p.cfg.bounds(r); b.clamp(have[r]) != have[r] {
			return want
		}
	}
	if now <= p.cfg.Budget && now >= gpus && lack(have) <= 1.15*lack(want) {
		for r := range p.pools {
			want[r] = have[r]
		}
	}
	return want
}

// advise says what has changed in what is wanted.
func (p *Planner) advise(now time.Time, wanted map[Role]int) (out []Decision) {
	for _, r := range p.roles() {
		l, was := p.pools[r], p.advised[r]
		if n := wanted[r] - was; n > 0 {
			out = append(out, p.decide(now, l, Decision{Kind: Start, N: n, Wanted: wanted[r]}))
		} else if n < 0 {
			out = append(out, p.decide(now, l, Decision{Kind: Stop, N: -n, Wanted: wanted[r]}))
		}
		p.advised[r] = wanted[r]
	}
	return out
}

// act orders what turns the fleet into what is wanted.
func (p *Planner) act(now time.Time, have, wanted map[Role]int, used int) (out []Decision) {
	lacks := func(r Role) int { return wanted[r] - have[r] }
	give := func(d Decision, l *pool) {
		d.Wanted = wanted[l.role]
		out = append(out, p.decide(now, l, d))
		p.orders = append(p.orders, order{kind: d.Kind, role: l.role, worker: d.Worker, gpus: l.gpus, until: now.Add(unseen)})
	}
	for _, r := range p.roles() {
		for _, from := range p.roles() {
			for lacks(r) > 0 && lacks(from) < 0 {
				w := p.leaves(from, Flip)
				if w == nil {
					break
				}
				give(Decision{Kind: Flip, From: from, Worker: w.ID, N: 1}, p.pools[r])
				have[r], have[from] = have[r]+1, have[from]-1
			}
		}
	}
	for _, r := range p.roles() {
		l := p.pools[r]
		for lacks(r) < 0 {
			w := p.leaves(r, Stop)
			if w == nil {
				break
			}
			give(Decision{Kind: Stop, Worker: w.ID, N: 1}, l)
			have[r]--
		}
		n := min(lacks(r), (p.cfg.Budget-used)/l.gpus)
		if n <= 0 {
			continue
		}
		d := p.decide(now, l, Decision{Kind: Start, N: n, Wanted: wanted[r]})
		for range n {
			p.orders = append(p.orders, order{kind: Start, role: r, gpus: l.gpus, until: now.Add(max(unseen, 2*p.start))})
		}
		out, used = append(out, d), used+n*l.gpus
	}
	return out
}

// leaves is the worker of a role that is missed least: one that still starts, else the least loaded of those that
// serve, unless it is the last one that does, or as many leave already as stay. A worker that still starts has no role to change.
func (p *Planner) leaves(r Role, kind Kind) (least *Worker) {
	serve, leave := 0, 0
	for i := range p.last.Workers {
		w := &p.last.Workers[i]
		if w.Role != r {
			continue
		}
		if w.State == Draining || slices.ContainsFunc(p.orders, func(o order) bool { return o.worker == w.ID }) {
			leave++
			continue
		}
		if w.State == Serving {
			serve++
		} else if kind == Flip {
			continue
		}
		if least == nil || cmp.Or(cmp.Compare(w.State, least.State), cmp.Compare(w.Running+w.Waiting, least.Running+least.Waiting),
			cmp.Compare(w.QueuedTokens, least.QueuedTokens), cmp.Compare(least.ID, w.ID)) < 0 {
			least = w
		}
	}
	if least != nil && least.State == Serving && (serve < 2 || leave >= serve) {
		return nil
	}
	return least
}

const (
	mostLogged = 64 // decisions
	mostOpen   = 64
)

// decide completes a decision with its reason and what is expected of it, and logs it.
func (p *Planner) decide(now time.Time, l *pool, d Decision) Decision {
	d.At, d.Role = now, l.role
	switch d.Reason = l.why; {
	case p.acts && d.Wanted == p.advised[l.role]: // the fleet has changed, not the mind
		d.Reason = fmt.Sprintf("%d %s workers are wanted, and %d are there", d.Wanted, l.role, l.here)
	case d.Reason == "" || l.wanted == p.advised[l.role]:
		d.Reason = fmt.Sprintf("%d %s workers are wanted, by bounds and budget", d.Wanted, l.role)
	}
	if d.Wanted != l.wanted {
		d.Reason += fmt.Sprintf("; the budget of %d leaves %d", p.cfg.Budget, d.Wanted)
	}
	if p.acts {
		p.advised[l.role] = d.Wanted
	}
	expect, _ := l.forecast(p.start)
	d.Predicted = Forecast{At: now.Add(p.start + 2*level), Load: expect, Workers: d.Wanted,
		Utilisation: min(1, expect*l.costs()/float64(max(1, d.Wanted)))}
	kept := d
	p.log = append(p.log[max(0, len(p.log)+1-mostLogged):], &kept)
	p.open = append(p.open[max(0, len(p.open)+1-mostOpen):], &kept)
	return d
}

// comeTrue compares predictions whose time has come with what is.
func (p *Planner) comeTrue() {
	p.open = slices.DeleteFunc(p.open, func(d *Decision) bool {
		if p.at.Before(d.Predicted.At) {
			return false
		}
		seen := p.pools[d.Role].seen(p.at)
		d.CameTrue = &seen
		return true
	})
}
