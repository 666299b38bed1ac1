// Command sametokens sends the same requests to several OpenAI servers and
// compares the tokens: the first one's answers are right by definition. It
// prints a table, a row a case, and exits 1 when anything differs.
//
//	sametokens -model M [-chat] alone=http://127.0.0.1:8100 xpyd=http://127.0.0.1:8000
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

type target struct{ name, url string }

func main() {
	model := flag.String("model", "", "model name to ask for")
	chat := flag.Bool("chat", false, "chat completions too: the model needs a template")
	sampled := flag.Bool("sampled", false, "sampling with a seed too: only for engines that promise the same tokens then")
	rounds := flag.Int("rounds", 2, "how often each case is sent: later rounds meet warm caches")
	parallel := flag.Int("parallel", 4, "cases at a time in every round but the first")
	timeout := flag.Duration("timeout", time.Minute, "for one request")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: sametokens -model M [FLAGS] NAME=URL NAME=URL...  (the first is right)")
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
	if bad := run(os.Stdout, targets, list, *rounds, *parallel, *timeout); bad > 0 {
		fmt.Fprintf(os.Stderr, "sametokens: %d answers differ\n", bad)
		os.Exit(1)
	}
}

// run compares and prints, and returns how many answers were not the same.
func run(out io.Writer, targets []target, list []testCase, rounds, parallel int, timeout time.Duration) (bad int) {
	ask := func(url string, c testCase) *reply {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		return send(ctx, url, c)
	}
	want := make([]*reply, len(list))
	for i, c := range list {
		want[i] = ask(targets[0].url, c)
		if want[i].err != nil {
			fmt.Fprintf(out, "%s: %s: %v\n", targets[0].name, c.name, want[i].err)
			bad++
		}
	}
	fmt.Fprintf(out, "| case | %s |", targets[0].name)
	for _, t := range targets[1:] {
		fmt.Fprintf(out, " %s |", t.name)
	}
	fmt.Fprintf(out, "\n|---|%s\n", strings.Repeat("---|", len(targets)))
	verdicts := make([][]string, len(list)) // by case, then target
	for i := range list {
		verdicts[i] = make([]string, len(targets)-1)
	}
	var mu sync.Mutex
	for round := range rounds {
		for n, t := range targets[1:] {
			at := parallel
			if round == 0 {
				at = 1
			}
			slots := make(chan struct{}, at)
			var wg sync.WaitGroup
			for i, c := range list {
				slots <- struct{}{}
				wg.Go(func() {
					defer func() { <-slots }()
					diff := differs(want[i], ask(t.url, c))
					mu.Lock()
					defer mu.Unlock()
					if diff != "" {
						bad++
						verdicts[i][n] = fmt.Sprintf("round %d: %s", round+1, diff)
					}
				})
			}
			wg.Wait()
		}
	}
	for i, c := range list {
		fmt.Fprintf(out, "| %s | %s |", c.name, want[i])
		for _, v := range verdicts[i] {
			if v == "" {
				v = fmt.Sprintf("same, %d×", rounds)
			}
			fmt.Fprintf(out, " %s |", strings.ReplaceAll(v, "|", `\|`))
		}
		fmt.Fprintln(out)
	}
	return bad
}
