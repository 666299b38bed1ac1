package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/xpyd/xpyd/internal/figures"
)

// check reports figures that nobody can repeat: of a command, a flag, a test, a stage or a
// make target that does not exist, or of a commit that is not in the history.
func check(root string, all []figures.Figure) error {
	var errs []error
	commands, commits := map[string]error{}, map[string]error{}
	for _, f := range all {
		if _, known := commands[f.Command]; !known {
			commands[f.Command] = checkCommand(root, f.Command)
		}
		if _, known := commits[f.Commit]; !known {
			commits[f.Commit] = checkCommit(root, f.Commit)
		}
		if err := errors.Join(commands[f.Command], commits[f.Commit]); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f.Name, err))
		}
	}
	return errors.Join(errs...)
}

// checkCommit asks git; where there is no whole history, there is nothing to ask.
func checkCommit(root, commit string) error {
	shallow, err := exec.Command("git", "-C", root, "rev-parse", "--is-shallow-repository").Output()
	if err != nil || strings.TrimSpace(string(shallow)) != "false" {
		return nil
	}
	if err := exec.Command("git", "-C", root, "cat-file", "-e", commit+"^{commit}").Run(); err != nil {
		return fmt.Errorf("commit %s is not in the history", commit)
	}
	return nil
}

// checkCommand looks for what a command line names.
func checkCommand(root, line string) error {
	words := strings.Fields(line)
	for len(words) > 0 && strings.Contains(words[0], "=") {
		name, _, _ := strings.Cut(words[0], "=")
		if !mentioned(root, name) {
			return fmt.Errorf("%q: nothing reads %s", line, name)
		}
		words = words[1:]
	}
	if len(words) == 0 {
		return fmt.Errorf("%q is no command", line)
	}
	program, args := words[0], words[1:]
	if program == "go" && len(args) > 1 && args[0] == "run" {
		program, args = strings.TrimPrefix(args[1], "./"), args[2:]
	}
	missing := ""
	switch {
	case program == "scripts/bench":
		return checkBench(line, args)
	case program == "make" && len(args) == 1:
		missing = lacks(root, "Makefile", `(?m)^`+regexp.QuoteMeta(args[0])+`:`)
	case program == "cuda.test" && len(args) == 2 && args[0] == "-test.run":
		missing = lacks(root, "kernels/cuda/*_test.go", `(?m)^func Test\w*`+strings.TrimPrefix(args[1], "Test"))
	case program == "probe" || program == "moves":
		for _, a := range args {
			if strings.Trim(a, "0123456789") != "" && missing == "" {
				missing = lacks(root, "kernels/cuda/probe/"+program+".cu", `"`+regexp.QuoteMeta(a)+`"`)
			}
		}
	case program == "scripts/cuda-test":
		for _, a := range args {
			if missing == "" {
				missing = lacks(root, "scripts/cudatest/stages.go", `name: "`+regexp.QuoteMeta(a)+`", about:`)
			}
		}
	case strings.HasPrefix(program, "scripts/"):
		source := program
		if info, err := os.Stat(filepath.Join(root, program)); err != nil {
			missing = program
		} else if info.IsDir() {
			source += "/*.go"
		}
		for _, a := range args {
			name := strings.TrimLeft(a, "-")
			if name != a && missing == "" {
				missing = lacks(root, source, `["'-]`+regexp.QuoteMeta(name)+`\b`)
			}
		}
	default:
		missing = "program " + program
	}
	if missing != "" {
		return fmt.Errorf("%q: there is no %s", line, missing)
	}
	return nil
}

// checkBench parses a command of this program as it would be parsed.
func checkBench(line string, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("%q names no benchmark", line)
	}
	c, err := find(args[0])
	if err == nil {
		_, _, err = c.parse(args[1:])
	}
	if err != nil {
		return fmt.Errorf("%q: %w", line, err)
	}
	return nil
}

// lacks returns the pattern if no file of a glob matches it.
func lacks(root, glob, pattern string) string {
	paths, _ := filepath.Glob(filepath.Join(root, glob))
	for _, path := range paths {
		if text, err := os.ReadFile(path); err == nil && regexp.MustCompile(pattern).Match(text) {
			return ""
		}
	}
	return pattern + " in " + glob
}

// mentioned reports whether a source under root has the text.
func mentioned(root, text string) (found bool) {
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || found {
			return fs.SkipAll
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "bench" || d.Name() == ".cache" || d.Name() == "bin") {
			return fs.SkipDir
		}
		if raw, err := os.ReadFile(path); err == nil && !d.IsDir() && strings.Contains(string(raw), text) {
			found = true
		}
		return nil
	})
	return found
}
