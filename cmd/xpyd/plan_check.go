package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/sim"
)

// asksHowMany reports whether the load says how many workers there are to be.
func (p *planFlags) asksHowMany() bool { return p.rate > 0 || p.most > p.least }

// check checks the flags.
func (p *planFlags) check(given func(flag string) bool) (sim.Promise, error) {
	out := sim.Promise{Share: p.share, PerToken: p.perThousand / 1000}
	if err := p.checkWorkers(given); err != nil {
		return out, err
	}
	switch {
	case !(p.share > 0 && p.share <= 1):
		return out, fmt.Errorf("--share %v: want more than 0 and at most 1", p.share)
	case p.window < time.Second:
		return out, fmt.Errorf("--window %v: want at least 1s", p.window)
	case p.perThousand < 0:
		return out, fmt.Errorf("--ttft-per-1000 %v: want 0 or more", p.perThousand)
	case p.maxContext < 0:
		return out, fmt.Errorf("--max-context %d: want 0 or more", p.maxContext)
	case p.seeds < 1 || p.seeds > 100:
		return out, fmt.Errorf("--seeds %d: want 1 to 100", p.seeds)
	}
	var err error
	if out.SLO, err = parseSLO(p.slo); err != nil {
		return out, err
	}
	if !out.Any() {
		return out, errors.New("--slo is needed, such as ttft=2s,tpot=25ms")
	}
	if out.TTFT == 0 && p.perThousand > 0 {
		return out, errors.New("--ttft-per-1000 adds to the ttft of --slo, which has none")
	}
	return out, nil
}

// mostRequests bounds a window.
const mostRequests = 1e7

// checkWorkers finds out how many workers there are.
func (p *planFlags) checkWorkers(given func(flag string) bool) error {
	const dear, slowest, fastest = 1e9, 1e-3, 1e5
	within := func(flag string, v float64) bool { return v > 0 && v <= dear || v == 0 && !given(flag) }
	switch {
	case !within("cost", p.cost):
		return fmt.Errorf("--cost %v: want more than 0 and at most %g", p.cost, dear)
	case !within("budget", p.budget):
		return fmt.Errorf("--budget %v: want more than 0 and at most %g", p.budget, dear)
	case given("rate") && !(p.rate >= slowest && p.rate <= fastest):
		return fmt.Errorf("--rate %v: want %g to %g requests a second", p.rate, slowest, fastest)
	case p.rate*p.window.Seconds() > mostRequests:
		return fmt.Errorf("--rate %v: in a --window of %v that is more than %g requests", p.rate, p.window, mostRequests)
	case p.rate > 0 && p.trace != "":
		return errors.New("--rate is of drawn requests: those of --trace come at their own times")
	case p.budget > 0 && given("workers"):
		return errors.New("--budget and --workers exclude each other: the former says how many workers there are")
	case p.budget > 0 && p.cost == 0:
		return errors.New("--budget needs --cost, what a worker costs an hour")
	case p.budget > 0:
		p.most = int(min(p.budget/p.cost+1e-9, mostWorkers+1))
		switch p.least = p.most; {
		case p.most < 1:
			return fmt.Errorf("--budget %v pays 0 workers at --cost %v: want 1 to %d", p.budget, p.cost, mostWorkers)
		case p.most > mostWorkers:
			return fmt.Errorf("--budget %v pays more than %d workers at --cost %v", p.budget, mostWorkers, p.cost)
		}
		return nil
	}
	first, last, isRange := strings.Cut(p.workers, "-")
	least, err := strconv.Atoi(first)
	most := least
	if err == nil && isRange {
		most, err = strconv.Atoi(last)
	}
	if err != nil || least < 1 || most < least || most > mostWorkers {
		return fmt.Errorf("--workers %s: want 1 to %d, or a range such as 1-8", p.workers, mostWorkers)
	}
	if isRange && p.rate == 0 && p.trace == "" {
		return fmt.Errorf("--workers %s asks how many a load needs: give its --rate, or a --trace", p.workers)
	}
	p.least, p.most = least, most
	return nil
}
