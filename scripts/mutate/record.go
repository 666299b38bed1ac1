package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// record is a line of the log: the outcome of one mutant.
type record struct {
	mutant
	Noticed    bool    `json:"noticed"`
	By         string  `json:"by,omitempty"`         // package and test
	How        string  `json:"how,omitempty"`        // without a failed test: panic, hung, exited
	Unsteady   bool    `json:"unsteady,omitempty"`   // that test passed when run alone
	Equivalent string  `json:"equivalent,omitempty"` // why no test could notice
	Seconds    float64 `json:"seconds"`
}

func (r *record) String() string {
	what := fmt.Sprintf("noticed by %s %s", r.By, r.How)
	switch {
	case r.Equivalent != "":
		what = "equivalent"
	case !r.Noticed:
		what = "NOT NOTICED"
	case r.Unsteady:
		what = fmt.Sprintf("noticed by %s (unsteady) %s", r.By, r.How)
	}
	return fmt.Sprintf("%s: %v", what, &r.mutant)
}

// readLog returns the records of a log by id; the last one wins. It ignores a line cut short when
// a run was killed.
func readLog(file string) (map[string]*record, error) {
	done := map[string]*record{}
	b, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		r := &record{}
		if err := json.Unmarshal([]byte(line), r); err == nil && r.ID != "" {
			done[r.ID] = r
		}
	}
	return done, nil
}

// readEquivalents reads mutants that no test could notice, and their reasons by what(). The file has
// blocks, separated by empty lines:
//
//	FILE FUNC KIND [NTH]     FUNC is - outside functions; NTH, if several look alike
//	- a line as it is
//	+ the line with the bug
//	The reason.
func readEquivalents(r io.Reader) (map[string]string, []*mutant, error) {
	e := map[string]string{}
	var list []*mutant
	var x *mutant
	var before, after, reason []string
	end := func() error {
		if x == nil {
			return nil
		}
		if len(reason) == 0 || len(before) == 0 || len(after) == 0 {
			return fmt.Errorf("%s %s: a block has what it was (-), what it would be (+) and the reason", x.File, x.Func)
		}
		x.Before, x.After = strings.Join(before, "\n"), strings.Join(after, "\n")
		e[x.what()] = strings.Join(reason, " ")
		list = append(list, x)
		x, before, after, reason = nil, nil, nil, nil
		return nil
	}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		switch line := strings.TrimRight(lines.Text(), " "); {
		case line == "":
			if err := end(); err != nil {
				return nil, nil, err
			}
		case strings.HasPrefix(line, "#"):
		case x == nil:
			x = &mutant{Nth: 1}
			f := strings.Fields(line)
			if len(f) == 4 {
				x.Nth, _ = strconv.Atoi(f[3])
			}
			if len(f) < 3 || len(f) > 4 || x.Nth < 1 {
				return nil, nil, fmt.Errorf("%q is no FILE FUNC KIND", line)
			}
			x.File, x.Func, x.Kind = f[0], strings.TrimPrefix(f[1], "-"), f[2]
		case strings.HasPrefix(line, "-"):
			before = append(before, strings.TrimPrefix(line[1:], " "))
		case strings.HasPrefix(line, "+"):
			after = append(after, strings.TrimPrefix(line[1:], " "))
		default:
			reason = append(reason, line)
		}
	}
	return e, list, errors.Join(lines.Err(), end())
}
