// Command sametokens sends the same requests to several OpenAI servers and compares their tokens
// with those of the first. It prints a table with a row per case and exits 1 if any differ.
//
//	sametokens -model M [-chat] alone=http://127.0.0.1:8100 xpyd=http://127.0.0.1:8000
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

type target struct{ name, url string }

func main() {
	model := flag.String("model", "", "model name to ask for")
	chat := flag.Bool("chat", false, "also chat completions; the model needs a template")
	sampled := flag.Bool("sampled", false, "also sampling with a seed, for engines that then promise the same tokens")
	text := flag.Bool("text", false, "no prompts of token ids: SGLang's router takes none")
	rounds := flag.Int("rounds", 2, "how often to send each case; later rounds meet warm caches")
	parallel := flag.Int("parallel", 4, "concurrent cases in all rounds but the first")
	timeout := flag.Duration("timeout", time.Minute, "of one request")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: sametokens -model M [FLAGS] NAME=URL NAME=URL...  (the first is the reference)")
		flag.PrintDefaults()
	}
	flag.Parse()
	var targets []target
	for _, a := range flag.Args() {
		name, url, ok := strings.Cut(a, "=")
		if !ok {
			flag.Usage()
			os.Exit(2)
		}
		targets = append(targets, target{name, strings.TrimRight(url, "/")})
	}
	if *model == "" || len(targets) < 2 || *rounds < 1 || *parallel < 1 {
		flag.Usage()
		os.Exit(2)
	}
	list := cases(*model, *chat, *sampled)
	if *text {
		list = slices.DeleteFunc(list, func(c testCase) bool { return strings.HasPrefix(c.name, "token ids") })
	}
	if bad := compare(os.Stdout, targets, list, *rounds, *parallel, *timeout); bad > 0 {
		fmt.Fprintf(os.Stderr, "sametokens: %d answers differ\n", bad)
		os.Exit(1)
	}
}

// compare prints the table and returns how many replies differ.
func compare(out io.Writer, targets []target, list []testCase, rounds, parallel int, timeout time.Duration) (bad int) {
	ask := func(url string, c testCase) *reply {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		r := &reply{choices: map[int]*choice{}}
		r.err = r.fetch(ctx, url, c)
		return r
	}
	want := make([]*reply, len(list))
	verdicts := make([][]string, len(list)) // by case, then target
	for i, c := range list {
		verdicts[i] = make([]string, len(targets)-1)
		if want[i] = ask(targets[0].url, c); want[i].err != nil {
			fmt.Fprintf(out, "%s: %s: %v\n", targets[0].name, c.name, want[i].err)
			bad++
		}
	}
	fmt.Fprint(out, "| case |")
	for _, t := range targets {
		fmt.Fprintf(out, " %s |", t.name)
	}
	fmt.Fprintf(out, "\n|---|%s\n", strings.Repeat("---|", len(targets)))
	var mu sync.Mutex
	for round := range rounds {
		for n, t := range targets[1:] {
			var all errgroup.Group
			all.SetLimit(1)
			if round > 0 {
				all.SetLimit(parallel)
			}
			for i, c := range list {
				all.Go(func() error {
					diff := differs(want[i], ask(t.url, c))
					mu.Lock()
					defer mu.Unlock()
					if diff != "" {
						bad++
						verdicts[i][n] = fmt.Sprintf("round %d: %s", round+1, diff)
					}
					return nil
				})
			}
			_ = all.Wait() // none returns an error
		}
	}
	for i, c := range list {
		fmt.Fprintf(out, "| %s | %s |", c.name, want[i])
		for _, v := range verdicts[i] {
			fmt.Fprintf(out, " %s |", strings.ReplaceAll(cmp.Or(v, fmt.Sprintf("same, %d×", rounds)), "|", `\|`))
		}
		fmt.Fprintln(out)
	}
	return bad
}
