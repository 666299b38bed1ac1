package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// configuration is a table of each sample's keys.
func configuration(folder string) (string, error) {
	var b strings.Builder
	b.WriteString("# Configuration" + made + `
A key is set in a YAML file (` + "`--config`" + `), in the environment, or by a flag; the later wins.
The variable of ` + "`limits.max_queue`" + ` is ` + "`XPYD_LIMITS__MAX_QUEUE`" + `, or ` + "`XPYD_LIMITS_MAX_QUEUE`" + `. ` + "`--print-config`" + ` shows what is
in force. An unknown key is an error. The samples in ` + "`configs/samples`" + ` have the same keys to copy from.
`)
	for _, role := range []struct{ file, title, note string }{
		{"router", "A router", ""},
		{"decode", "A worker", "Of prefill and decode alike; `role` is the command's."},
		{"up", "`xpyd up`", "It also takes each key of a router."},
	} {
		text, err := os.ReadFile(filepath.Join(folder, role.file+".yaml"))
		if err != nil {
			return "", err
		}
		keys, _, _ := strings.Cut(string(text), "# The rest is the router's.")
		if role.file == "up" && len(keys) == len(text) {
			return "", fmt.Errorf("%s.yaml does not say where the router's keys begin", role.file)
		}
		fmt.Fprintf(&b, "\n## %s\n\n", role.title)
		if role.note != "" {
			b.WriteString(role.note + "\n\n")
		}
		b.WriteString("| key | default | what |\n|---|---|---|\n")
		for _, k := range parse(keys) {
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", k.name, k.value, k.what)
		}
	}
	return b.String(), nil
}

type key struct{ name, value, what string }

var (
	// A key at its default, commented out, and a section.
	assigned = regexp.MustCompile(`^( *)#([a-z0-9_]+): (.*)$`)
	section  = regexp.MustCompile(`^( *)([a-z0-9_]+):$`)
	comment  = regexp.MustCompile(`^ *# (.*)$`)
)

// parse returns a sample's keys, each with the comment before it. Adjacent keys share the first
// one's comment.
func parse(text string) (keys []key) {
	var path, words []string
	said := false // words already belong to a key
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if m := comment.FindStringSubmatch(line); m != nil {
			if said {
				words, said = nil, false
			}
			words = append(words, m[1])
		} else if m := section.FindStringSubmatch(line); m != nil {
			path = append(path[:len(m[1])/2], m[2])
			if !said && len(words) > 0 {
				keys = append(keys, key{strings.Join(path, ".") + ".…", "", cell(words)})
			}
			words, said = nil, false
		} else if m := assigned.FindStringSubmatch(line); m != nil {
			path = append(path[:len(m[1])/2], m[2])
			what := cell(words)
			if said && len(words) > 0 {
				what = "as above"
			}
			keys = append(keys, key{strings.Join(path, "."), "`" + m[3] + "`", what})
			said = true
		} else if line == "" {
			words, said = nil, false
		}
	}
	return keys
}

// cell is a comment as a table's cell.
func cell(words []string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "*", `\*`).Replace(strings.Join(words, " "))
}
