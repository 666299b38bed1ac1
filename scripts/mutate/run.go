package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// runner tries mutants, one at a time.
type runner struct {
	options
	suite       *suite
	equivalents map[string]string // reasons, by what()
	drawn       []*mutant
	out         io.Writer
	took        map[string]time.Duration // by a package's own tests, without a bug
}

func (r *runner) run(ctx context.Context) error {
	done, log := map[string]*record{}, io.Discard
	if r.log != "" {
		var err error
		if done, err = readLog(r.log); err != nil {
			return err
		}
		f, err := os.OpenFile(r.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		defer f.Close()
		log = f
	}
	open := slices.DeleteFunc(slices.Clone(r.drawn), func(x *mutant) bool {
		was := done[x.ID]
		return was != nil && (was.Noticed || was.Equivalent != "" || !r.again)
	})
	if err := r.sound(ctx, open); err != nil {
		return err
	}
	start := time.Now()
	for i, x := range open {
		rec, err := r.try(ctx, x)
		if err != nil {
			return err
		}
		done[x.ID] = rec
		if err := json.NewEncoder(log).Encode(rec); err != nil {
			return err
		}
		left := time.Since(start) / time.Duration(i+1) * time.Duration(len(open)-i-1)
		fmt.Fprintf(r.out, "%d/%d %s (%.0f s, %v left)\n", i+1, len(open), rec, rec.Seconds, left.Round(time.Second))
	}
	summary(r.out, r.drawn, done)
	return nil
}

// levels are the packages whose tests run with a mutant, the nearest first.
func (r *runner) levels(x *mutant) [][]string {
	levels := r.suite.of(r.suite.m.path + "/" + x.Package)
	if r.own && len(levels) > 1 {
		levels = levels[:1]
	}
	return levels
}

// sound checks that the tests pass without a bug, each package's once, and times the own tests of
// packages that get one.
func (r *runner) sound(ctx context.Context, open []*mutant) error {
	passed := map[string]bool{}
	for _, x := range open {
		if _, ok := r.took[x.Package]; ok || r.equivalents[x.what()] != "" {
			continue
		}
		for i, level := range r.levels(x) {
			if level = slices.DeleteFunc(slices.Clone(level), func(p string) bool { return i > 0 && passed[p] }); len(level) == 0 {
				continue
			}
			start := time.Now()
			c := check{packages: level, limit: r.limit, fresh: i == 0}
			res, err := r.suite.test(ctx, c)
			if err == nil && res.pkg != "" { // a busy machine may have been at fault
				res, err = r.suite.test(ctx, c)
			}
			if err != nil {
				return err
			}
			if res.pkg != "" {
				return fmt.Errorf("%s fails without a bug: %s %s", res.pkg, res.test, res.how)
			}
			for _, p := range level {
				passed[p] = true
			}
			if i == 0 {
				r.took[x.Package] = time.Since(start)
			}
		}
		fmt.Fprintf(r.out, "%s passes without a bug\n", x.Package)
	}
	return nil
}

// try runs the tests with one bug, the nearest first, until one fails.
func (r *runner) try(ctx context.Context, x *mutant) (*record, error) {
	rec, start := &record{mutant: *x, Equivalent: r.equivalents[x.what()]}, time.Now()
	if rec.Equivalent != "" {
		return rec, nil
	}
	for i, level := range r.levels(x) {
		limit := r.limit
		if i == 0 {
			limit = min(limit, 30*time.Second+4*r.took[x.Package])
		}
		res, steady, err := r.fails(ctx, check{mutant: x, packages: level, limit: limit, fresh: true})
		if err != nil {
			return nil, err
		}
		if res.pkg != "" {
			rec.Noticed, rec.Unsteady, rec.How = true, !steady, res.how
			rec.By = strings.TrimSpace(strings.TrimPrefix(res.pkg, r.suite.m.path+"/") + " " + res.test)
			break
		}
	}
	rec.Seconds = float64(time.Since(start).Milliseconds()) / 1000
	return rec, nil
}

// fails returns how tests fail. A failure is steady if its test also fails alone. Others may come
// from a busy machine, and count only if the tests fail a second time.
func (r *runner) fails(ctx context.Context, c check) (res result, steady bool, err error) {
	for range 2 {
		if res, err = r.suite.test(ctx, c); err != nil || res.pkg == "" {
			return res, true, err
		}
		if res.broken {
			return res, true, fmt.Errorf("%v: does not compile", c.mutant)
		}
		alone := c
		alone.packages = []string{res.pkg}
		if res.test != "" {
			top, _, _ := strings.Cut(res.test, "/")
			alone.run = "^" + top + "$"
		}
		if a, err := r.suite.test(ctx, alone); err != nil || a.pkg != "" {
			return res, true, err
		}
	}
	return res, false, nil
}

// summary prints the survivors, and the share noticed by package and kind.
func summary(out io.Writer, drawn []*mutant, done map[string]*record) {
	var all score
	by := map[string]*score{}
	for _, x := range drawn {
		rec := done[x.ID]
		if rec == nil {
			continue
		}
		if !rec.Noticed && rec.Equivalent == "" {
			fmt.Fprintln(out, rec)
		}
		all.add(rec)
		for _, name := range []string{x.Package, "kind " + x.Kind} {
			if by[name] == nil {
				by[name] = &score{}
			}
			by[name].add(rec)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(by)) {
		fmt.Fprintf(out, "%-24s %v\n", name, by[name])
	}
	fmt.Fprintf(out, "noticed %v\n", &all)
}

// score counts mutants; total excludes equivalent ones.
type score struct{ noticed, total, same int }

func (s *score) add(r *record) {
	if r.Equivalent != "" {
		s.same++
		return
	}
	s.total++
	if r.Noticed {
		s.noticed++
	}
}

func (s *score) String() string {
	text := fmt.Sprintf("%d of %d", s.noticed, s.total)
	if s.total > 0 {
		text += fmt.Sprintf(", %.1f %%", 100*float64(s.noticed)/float64(s.total))
	}
	if s.same > 0 {
		text += fmt.Sprintf(" (and %d equivalent)", s.same)
	}
	return text
}
