// Command reference writes docs/reference from the code: the commands as cobra prints them, the
// configuration's keys from the samples (which a test keeps complete), the fields of requests, and the
// metrics and routes of a router and its workers.
//
//	go run ./scripts/reference -xpyd bin/xpyd -out docs/reference
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/xpyd/xpyd/router"
	"github.com/xpyd/xpyd/worker"
)

func main() {
	log.SetFlags(0)
	xpyd := flag.String("xpyd", "bin/xpyd", "the built program")
	samples := flag.String("samples", "configs/samples", "folder of the sample configurations")
	out := flag.String("out", "docs/reference", "folder to write to")
	flag.Parse()
	pages, err := render(*xpyd, *samples)
	if err != nil {
		log.Fatal("reference: ", err)
	}
	if err := os.MkdirAll(*out, 0o755); err != nil {
		log.Fatal(err)
	}
	for name, text := range pages {
		if err := os.WriteFile(filepath.Join(*out, name), []byte(text), 0o644); err != nil {
			log.Fatal(err)
		}
	}
}

// render returns the pages by name.
func render(xpyd, samples string) (map[string]string, error) {
	cli, err := commands(xpyd)
	if err != nil {
		return nil, err
	}
	keys, err := configuration(samples)
	if err != nil {
		return nil, err
	}
	metrics, err := metrics()
	if err != nil {
		return nil, err
	}
	fields, err := fields()
	if err != nil {
		return nil, err
	}
	return map[string]string{"fields.md": fields, "cli.md": cli, "configuration.md": keys, "metrics.md": metrics, "http.md": routes()}, nil
}

const made = "\n\nMade by `make reference`; do not edit.\n"

// commands is the help of each command, followed by its subcommands.
func commands(xpyd string) (string, error) {
	var b strings.Builder
	b.WriteString("# Commands" + made + "\nExit codes: 0 done, 1 failed, 2 bad usage or configuration.\n")
	var walk func(path []string) error
	walk = func(path []string) error {
		cmd := exec.Command(xpyd, append(path, "--help")...)
		cmd.Env = []string{"HOME=/home/you"} // defaults that depend on the machine
		help, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("%v: %w", cmd, err)
		}
		fmt.Fprintf(&b, "\n## %s\n\n```text\n%s```\n", strings.Join(append([]string{"xpyd"}, path...), " "), help)
		_, list, _ := strings.Cut(string(help), "Available Commands:\n")
		list, _, _ = strings.Cut(list, "\n\n")
		for line := range strings.Lines(list) {
			if name := strings.Fields(line); len(name) > 0 && name[0] != "help" {
				if err := walk(append(path[:len(path):len(path)], name[0])); err != nil {
					return err
				}
			}
		}
		return nil
	}
	err := walk(nil)
	return b.String(), err
}

// routes is a table of each listener.
func routes() string {
	var b strings.Builder
	b.WriteString("# HTTP" + made + `
Errors are OpenAI's: ` + "`" + `{"error": {"message", "type", "param", "code"}}` + "`" + `. HEAD is GET without a body.
` + "`x-request-id`" + ` is in each answer: the client's, or one that was made here.
`)
	titles := map[string]string{"public": "A router's public listener (`listen`)", "admin": "A router's admin listener (`admin_listen`)"}
	last := ""
	row := func(method, path, who, what string) {
		fmt.Fprintf(&b, "| %s | `%s` | %s | %s |\n", method, path, who, what)
	}
	table := func(title string) {
		fmt.Fprintf(&b, "\n## %s\n\n| | path | for | what |\n|---|---|---|---|\n", title)
	}
	for _, r := range router.Routes() {
		if r.Listener != last {
			table(titles[r.Listener])
			last = r.Listener
		}
		row(r.Method, r.Path, r.For, r.What)
	}
	table("A worker (`listen`)")
	who := map[string]string{"control": "the fleet", "public": "the fleet, API keys", "query": "the fleet, workers, API keys", "metrics": "this machine, the scrape token", "open": "anybody"}
	for _, r := range worker.Routes() {
		row(r.Method, r.Path, who[r.For], r.What)
	}
	return b.String()
}
