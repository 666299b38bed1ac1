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

// record is a line of the log: what became of one mutant.
type record struct {
	mutant
	Noticed    bool    `json:"noticed"`
	By         string  `json:"by,omitempty"`         // package and test
	How        string  `json:"how,omitempty"`        // where no test says it failed
	Unsteady   bool    `json:"unsteady,omitempty"`   // the failure did not come again when that test ran alone
	Equivalent string  `json:"equivalent,omitempty"` // why no test could notice
	Seconds    float64 `json:"seconds"`
}

func (r *record) String() string {
	switch {
	case r.Equivalent != "":
		return fmt.Sprintf("equivalent: %v", &r.mutant)
	case !r.Noticed:
		return fmt.Sprintf("NOT NOTICED: %v", &r.mutant)
	case r.Unsteady:
		return fmt.Sprintf("noticed by %s (unsteady) %s: %v", r.By, r.How, &r.mutant)
	}
	return fmt.Sprintf("noticed by %s %s: %v", r.By, r.How, &r.mutant)
}

// readLog returns what a log has so far, by id. The last line of one wins; half
// a line, of a run that was killed, counts for nothing.
func readLog(file string) (map[string]*record, error) {
	done := map[string]*record{}
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return done, nil
	} else if err != nil {
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

// write appends a line to a log.
func (r *record) write(w io.Writer) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = w.Write(append(b, '\n'))
	return err
}

// equivalents are mutants that no test could notice, with the reason. The file has
// a block for each, and an empty line between blocks: FILE FUNC KIND, and the number of
// it where the function has several that look alike; the lines as they are, after "- ",
// as they would be, after "+ ", and the reason. FUNC is - outside functions.
type equivalents map[string]string

func (e equivalents) reason(x *mutant) string { return e[x.what()] }

func readEquivalents(r io.Reader) (equivalents, []*mutant, error) {
	e := equivalents{}
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
