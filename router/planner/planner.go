package planner

import (
	"maps"
	"slices"
	"time"
)

// Planner plans for one fleet. It is for one goroutine.
type Planner struct {
	cfg   Config
	at    time.Time // of the last sample
	last  Sample
	pools map[Role]*pool
	acts  bool

	output fading // tokens of an answer
	prompt fading
	start  time.Duration
	begun  map[string]time.Time // workers that start, since when
	known  map[string]bool      // IDs of the last sample
	orders []order

	aim      float64
	broke    float64 // the aim at which promises were broken last; it is forgotten slowly
	good     int     // of judged since the aim was judged
	promised int
	lagged   time.Time // when workers were missing last: what goes wrong then, and soon after, is not the aim's
	aimed    time.Time

	looked  time.Time // when need was judged last
	advised map[Role]int
	log     []*Decision
	open    []*Decision // whose prediction's time has not come
}

// New makes a planner. One that acts compares what it wants with what is there, and gives orders until it is;
// the other only says what has changed in what it wants.
func New(cfg Config, acts bool) *Planner {
	return &Planner{cfg: cfg, acts: acts, pools: map[Role]*pool{}, begun: map[string]time.Time{}, known: map[string]bool{},
		start: cfg.StartTime, aim: cfg.Utilisation, broke: 1, advised: map[Role]int{}}
}

// SetBudget changes the budget, as other models take a part of it.
func (p *Planner) SetBudget(gpus int) { p.cfg.Budget = max(gpus, 0) }

// Observe takes in a sample. Those that are not later than the last one are ignored.
func (p *Planner) Observe(s Sample) {
	first := p.at.IsZero()
	took := s.At.Sub(p.at)
	if !first && took <= 0 {
		return
	}
	was := p.last
	p.at, p.last = s.At, s
	p.last.Workers = slices.Clone(s.Workers)
	p.count()
	p.follow()
	if first {
		p.aimed = s.At
		return
	}
	p.output.add(float64(s.OutputTokens), float64(s.Ended), took, costLasts)
	p.prompt.add(float64(s.PromptTokens), float64(s.Requests), took, costLasts)
	computed := max(0, float64(s.PromptTokens+queued(&was)-queued(&s)))
	came := float64(s.Requests) * p.output.ratio()
	for _, l := range p.pools {
		switch l.role {
		case Prefill:
			l.load.add(float64(s.PromptTokens), took)
			l.measure(&s, took, computed, p.output.ratio())
		case Decode:
			l.load.add(came, took)
			l.measure(&s, took, float64(s.OutputTokens), p.output.ratio())
		default:
			l.load.add(float64(s.PromptTokens)+answerWeight*came, took)
			l.measure(&s, took, computed+answerWeight*float64(s.OutputTokens), p.output.ratio())
		}
	}
	p.promise(&s)
	p.comeTrue()
}

func queued(s *Sample) (n int) {
	for i := range s.Workers {
		n += s.Workers[i].QueuedTokens
	}
	return n
}

// count counts the workers of each role.
func (p *Planner) count() {
	for _, l := range p.pools {
		l.here, l.serving, l.running, l.waiting, l.queued, l.queues = 0, 0, 0, 0, 0, 0
	}
	for i := range p.last.Workers {
		w := &p.last.Workers[i]
		l := p.pools[w.Role]
		if l == nil {
			l = &pool{role: w.Role, hold: p.cfg.CoolDown, least: p.cfg.CoolDown, gpus: 1}
			p.pools[w.Role] = l
		}
		l.gpus = max(l.gpus, w.GPUs)
		l.running += w.Running
		l.waiting += w.Waiting
		l.queued += w.QueuedTokens
		if w.State != Draining {
			l.here++
		}
		if w.State == Serving {
			l.serving++
			if w.Waiting > 0 {
				l.queues++
			}
		}
	}
	if d, f := p.pools[Decode], p.pools[Prefill]; d != nil && f != nil {
		// Decode's requests wait for prefill, with their blocks, and others for these blocks.
		if d.blocked = f.busy.ratio() > 0.9 || d.running < d.serving; d.blocked {
			f.queued = max(f.queued, int(float64(d.waiting)*p.prompt.ratio()))
		}
	}
	for r, l := range p.pools {
		if l.wanted == 0 { // it is new
			l.wanted = p.cfg.bounds(r).clamp(l.here)
			l.fits = l.wanted
			p.advised[r] = l.here
		}
	}
}

// follow learns how long workers take to start, and sees which orders are carried out.
func (p *Planner) follow() {
	now, ids := p.at, make(map[string]bool, len(p.last.Workers))
	for i := range p.last.Workers {
		w := &p.last.Workers[i]
		ids[w.ID] = true
		if !p.known[w.ID] {
			p.arrived(w.Role)
		}
		since, starts := p.begun[w.ID]
		switch {
		case w.State == Starting && !starts:
			p.begun[w.ID] = now
		case w.State != Starting && starts:
			delete(p.begun, w.ID)
			p.start = (p.start + now.Sub(since)) / 2
		}
	}
	maps.DeleteFunc(p.begun, func(id string, _ time.Time) bool { return !ids[id] })
	p.known = ids
	p.settle(now)
}

const (
	// aimEvery is how often it is judged whether the aim keeps promises, fewJudged are too few requests for it.
	aimEvery  = 10 * time.Minute
	fewJudged = 50
	leastAim  = 0.3 // of Utilisation
	mostAim   = 0.9
)

// promise moves the aim to where promises are kept.
func (p *Planner) promise(s *Sample) {
	p.good += s.Good
	p.promised += s.Judged
	for _, l := range p.pools {
		if l.serving < l.wanted || l.late {
			p.lagged = s.At
		}
	}
	took := s.At.Sub(p.aimed)
	if took < aimEvery || p.promised < fewJudged {
		return
	}
	share := float64(p.good) / float64(p.promised)
	used := 0.0
	for _, l := range p.pools {
		used = max(used, l.busy.ratio())
	}
	p.broke = min(1, p.broke*(1+0.03*took.Hours()))
	switch {
	case share < p.cfg.Goal && (s.At.Sub(p.lagged) < took+aimEvery/2 || used < 0.8*p.aim): // something else was wrong
	case share < p.cfg.Goal:
		p.broke = p.aim
		p.aim = max(leastAim*p.cfg.Utilisation, p.aim*max(0.85, 1-(p.cfg.Goal-share)))
	case share > (1+p.cfg.Goal)/2 && used > 0.7*p.aim:
		p.aim = max(p.aim, min(p.aim*1.03, p.broke*0.95, mostAim))
	}
	p.aimed, p.good, p.promised = s.At, 0, 0
}

// Wanted is how many workers of each role there are to be, within the budget.
func (p *Planner) Wanted() map[Role]int {
	out := map[Role]int{}
	for r, l := range p.pools {
		out[r] = l.fits
	}
	return out
}

// Status is what a planner thinks, for people.
type Status struct {
	Aim       float64       `json:"aim"` // the utilisation that it goes for
	StartTime time.Duration `json:"start_time_ns"`
	Roles     []RoleStatus  `json:"roles"`
	Decisions []Decision    `json:"decisions"` // the latest ones, the oldest first
}

// RoleStatus is what it thinks of a role.
type RoleStatus struct {
	Role   Role     `json:"role"`
	Have   int      `json:"have"` // that serve or start
	Wanted int      `json:"wanted"`
	Need   float64  `json:"need"` // workers, without bounds and budget
	Now    Forecast `json:"now"`
	// Expected is the load once a worker that starts now serves, and PerWorker that which one is given; 0: not
	// known yet.
	Expected  float64 `json:"expected_load"`
	PerWorker float64 `json:"load_per_worker"`
}

// Status says what the planner thinks.
func (p *Planner) Status() Status {
	s := Status{Aim: p.aim, StartTime: p.start, Roles: []RoleStatus{}, Decisions: []Decision{}}
	for _, r := range p.roles() {
		l := p.pools[r]
		expect, _ := l.forecast(p.start)
		role := RoleStatus{Role: r, Have: l.here, Wanted: l.fits, Need: l.need, Now: l.seen(p.at), Expected: expect}
		if c := l.costs(); c > 0 {
			role.PerWorker = p.aim / c
		}
		s.Roles = append(s.Roles, role)
	}
	for _, d := range p.log {
		s.Decisions = append(s.Decisions, *d)
	}
	return s
}

func (p *Planner) roles() []Role { return slices.Sorted(maps.Keys(p.pools)) }
