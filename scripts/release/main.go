// Command release makes everything that a release consists of, for linux on amd64 and arm64: an archive, a
// deb and an rpm with systemd units, an SBOM; the Helm chart; and the checksums of all. The same commit gives the same bytes.
//
//	go run ./scripts/release -version v1.2.3 -out dist
//
// It reads the tree that it runs in, and refuses one with changes, whose bytes nobody could make again.
package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Programs that are built for their one use here; they are no dependencies of xpyd.
const (
	packager = "github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.0"
	biller   = "github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0"
)

var versions = regexp.MustCompile(`^v\d+\.\d+\.\d+(-[0-9A-Za-z.]+)?$`)

// release is what all steps need to know.
type release struct {
	ctx     context.Context
	version string    // v1.2.3
	at      time.Time // of the commit: the time of every file
	out     string    // where the release goes
	work    string    // emptied at the end
}

func main() {
	log.SetFlags(0)
	version := flag.String("version", "", "of the release, such as v1.2.3")
	out := flag.String("out", "dist/release", "folder to write to; it must be empty or absent")
	arches := flag.String("arch", "amd64,arm64", "which of them")
	dirty := flag.Bool("dirty", false, "take a tree with changes, for a try")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *version, *out, strings.Split(*arches, ","), *dirty); err != nil {
		log.Fatal("release: ", err)
	}
}

func run(ctx context.Context, version, out string, arches []string, dirty bool) error {
	if !versions.MatchString(version) {
		return fmt.Errorf("-version %q: want one such as v1.2.3 or v1.2.3-rc.1", version)
	}
	for _, arch := range arches {
		if arch != "amd64" && arch != "arm64" {
			return fmt.Errorf("-arch %q: want amd64 or arm64", arch)
		}
	}
	if entries, err := os.ReadDir(out); err == nil && len(entries) > 0 {
		return fmt.Errorf("%s is not empty", out)
	}
	r := &release{ctx: ctx, version: version}
	var err error
	if r.out, err = filepath.Abs(out); err != nil {
		return err
	}
	if r.at, err = commitTime(ctx, dirty); err != nil {
		return err
	}
	if r.work, err = os.MkdirTemp("", "xpyd-release-"); err != nil {
		return err
	}
	defer os.RemoveAll(r.work)
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	said, err := r.handbook()
	if err != nil {
		return err
	}
	for _, arch := range arches {
		if err := r.forArch(arch, said); err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
	}
	if err := r.chart(); err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	return r.checksums()
}

// commitTime is when the commit was made that the tree has.
func commitTime(ctx context.Context, dirty bool) (time.Time, error) {
	changed, err := exec.CommandContext(ctx, "git", "status", "--porcelain").Output()
	if err != nil {
		return time.Time{}, fmt.Errorf("git status: %w", err)
	}
	if len(changed) > 0 && !dirty {
		return time.Time{}, fmt.Errorf("the tree has changes, and a release must be made of a commit:\n%s", changed)
	}
	text, err := exec.CommandContext(ctx, "git", "log", "-1", "--format=%ct").Output()
	if err != nil {
		return time.Time{}, fmt.Errorf("git log: %w", err)
	}
	seconds, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return time.Unix(seconds, 0).UTC(), err
}

// handbook is what a binary of this machine says of itself: man pages and shells' completions.
func (r *release) handbook() ([]file, error) {
	log.Print("man pages and completions")
	binary := filepath.Join(r.work, "xpyd-here")
	if err := r.build(binary, runtime.GOARCH); err != nil {
		return nil, err
	}
	list, err := manPages(r, binary)
	if err != nil {
		return nil, err
	}
	for shell, name := range map[string]string{"bash": "xpyd.bash", "zsh": "_xpyd", "fish": "xpyd.fish"} {
		text, err := r.output(binary, "completion", shell)
		if err != nil {
			return nil, err
		}
		list = append(list, file{name: "completions/" + name, data: text})
	}
	slices.SortFunc(list, func(a, b file) int { return strings.Compare(a.name, b.name) })
	return list, nil
}

func (r *release) forArch(arch string, said []file) error {
	log.Printf("%s: binary", arch)
	name := fmt.Sprintf("xpyd_%s_linux_%s", strings.TrimPrefix(r.version, "v"), arch)
	tree := filepath.Join(r.work, name)
	if err := os.Mkdir(tree, 0o755); err != nil {
		return err
	}
	if err := r.build(filepath.Join(tree, "xpyd"), arch); err != nil {
		return err
	}
	if err := gather(tree, said); err != nil {
		return err
	}
	log.Printf("%s: archive", arch)
	if err := archive(filepath.Join(r.out, name+".tar.gz"), tree, name, r.at); err != nil {
		return err
	}
	for _, kind := range []string{"deb", "rpm"} {
		log.Printf("%s: %s", arch, kind)
		if err := r.pack(kind, arch, tree, filepath.Join(r.out, name+"."+kind)); err != nil {
			return fmt.Errorf("%s: %w", kind, err)
		}
	}
	log.Printf("%s: bill of materials", arch)
	return r.bill(filepath.Join(tree, "xpyd"), filepath.Join(r.out, name+".cdx.json"))
}

// build makes the static binary. Nothing of the machine gets into it.
func (r *release) build(to, arch string) error {
	cmd := exec.CommandContext(r.ctx, "go", "build", "-trimpath", "-buildvcs=true", "-ldflags=-s -w -buildid= -X main.stamped="+r.version, "-o", to, "./cmd/xpyd")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0")
	return quiet(cmd)
}

// bill lists the modules in a binary, in CycloneDX's form.
func (r *release) bill(binary, to string) error {
	cmd := exec.CommandContext(r.ctx, "go", "run", biller, "bin", "-json", "-noserial", "-version", r.version, "-output", to, binary)
	cmd.Env = r.reproducible()
	if err := quiet(cmd); err != nil {
		return err
	}
	text, err := os.ReadFile(to)
	if err != nil {
		return err
	}
	return os.WriteFile(to, stamped(text, r.at), 0o644)
}

var timestamp = regexp.MustCompile(`"timestamp": "[^"]*"`)

// stamped has a bill of materials say the commit's time instead of when it was written.
func stamped(bill []byte, at time.Time) []byte {
	return timestamp.ReplaceAll(bill, []byte(`"timestamp": "`+at.Format(time.RFC3339)+`"`))
}

// checksums writes SHA256SUMS, as sha256sum -c reads it.
func (r *release) checksums() error {
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var b strings.Builder
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(r.out, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%x  %s\n", sha256.Sum256(data), e.Name())
	}
	log.Printf("%s: %d files and SHA256SUMS", r.out, len(entries))
	return os.WriteFile(filepath.Join(r.out, "SHA256SUMS"), []byte(b.String()), 0o644)
}

// reproducible is the environment of programs that are built here and write into the release.
func (r *release) reproducible() []string {
	return append(os.Environ(), "GOFLAGS=-trimpath", "CGO_ENABLED=0", "SOURCE_DATE_EPOCH="+strconv.FormatInt(r.at.Unix(), 10))
}

// output runs a program with a home that is nobody's, since its help names defaults there.
func (r *release) output(program string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(r.ctx, program, args...)
	cmd.Env = []string{"HOME=/home/you"}
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%v: %w", cmd.Args, err)
	}
	return out, err
}

// quiet runs a command, and has its error say what it wrote.
func quiet(cmd *exec.Cmd) error {
	out, err := cmd.CombinedOutput()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, out)
	}
	return err
}
