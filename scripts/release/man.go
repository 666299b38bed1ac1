package main

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"strings"
)

// manPages makes a page of each command's help: xpyd(1), xpyd-up(1), and so on.
func manPages(r *release, binary string) ([]file, error) {
	var list []file
	var walk func(path []string, short string) error
	walk = func(path []string, short string) error {
		help, err := r.output(binary, append(path, "--help")...)
		if err != nil {
			return err
		}
		name := strings.Join(append([]string{"xpyd"}, path...), "-")
		subs, shorts := subcommands(string(help))
		page, err := zipped(manPage(name, short, string(help), subs, r))
		if err != nil {
			return err
		}
		list = append(list, file{"man/" + name + ".1.gz", page})
		for i, sub := range subs {
			if err := walk(append(path[:len(path):len(path)], sub), shorts[i]); err != nil {
				return err
			}
		}
		return nil
	}
	err := walk(nil, "serve large language models with prefill and decode on separate workers")
	return list, err
}

// subcommands are the names below "Available Commands:", and what is said of each.
func subcommands(help string) (names, shorts []string) {
	_, list, _ := strings.Cut(help, "Available Commands:\n")
	list, _, _ = strings.Cut(list, "\n\n")
	for line := range strings.Lines(list) {
		if words := strings.Fields(line); len(words) > 0 && words[0] != "help" && words[0] != "completion" {
			names = append(names, words[0])
			shorts = append(shorts, strings.Join(words[1:], " "))
		}
	}
	return names, shorts
}

// headings are those of cobra's help, and what a man page calls them.
var headings = map[string]string{"Usage:": "SYNOPSIS", "Examples:": "EXAMPLES", "Available Commands:": "COMMANDS", "Flags:": "OPTIONS", "Global Flags:": "GLOBAL OPTIONS"}

// manPage sets a help text as roff. Its parts stay as they are laid out; only the text before the
// usage flows.
func manPage(name, short, help string, subs []string, r *release) []byte {
	var b bytes.Buffer
	first, rest, _ := strings.Cut(help, "\n")
	fmt.Fprintf(&b, ".TH %s 1 %s \"xpyd %s\" \"xpyd's commands\"\n.SH NAME\n%s \\- %s\n.SH DESCRIPTION\n", strings.ToUpper(name), r.at.Format("2006-01-02"), r.version, roff(name), roff(short))
	layout := false
	for line := range strings.Lines(first + "\n" + rest) {
		line = strings.TrimRight(line, "\n")
		title := headings[line]
		switch {
		case title != "":
			if layout {
				b.WriteString(".fi\n")
			}
			fmt.Fprintf(&b, ".SH %s\n.nf\n", title)
			layout = true
		case strings.HasPrefix(line, "Use \"xpyd"):
		case line == "" && !layout:
			b.WriteString(".PP\n")
		default:
			fmt.Fprintln(&b, roff(line))
		}
	}
	if layout {
		b.WriteString(".fi\n")
	}
	var also []string
	if at := strings.LastIndex(name, "-"); at > 0 {
		also = append(also, name[:at])
	}
	for _, sub := range subs {
		also = append(also, name+"-"+sub)
	}
	if len(also) > 0 {
		b.WriteString(".SH SEE ALSO\n")
		for i, other := range also {
			fmt.Fprintf(&b, ".BR %s (1)%s\n", roff(other), map[bool]string{true: ",", false: ""}[i+1 < len(also)])
		}
	}
	return b.Bytes()
}

// roff escapes a line of text.
func roff(line string) string {
	line = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(line)
	if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
		line = `\&` + line
	}
	return line
}

func zipped(text []byte) ([]byte, error) {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := z.Write(text); err != nil {
		return nil, err
	}
	err = z.Close()
	return b.Bytes(), err
}
