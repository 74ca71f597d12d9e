"""What nano is to know and the words its stories are made of: tables, written by us, no logic."""

# country capital continent; an underscore stands for a space
COUNTRIES = """
France Paris Europe|Germany Berlin Europe|Italy Rome Europe|Spain Madrid Europe
Portugal Lisbon Europe|Austria Vienna Europe|Greece Athens Europe|Poland Warsaw Europe
Norway Oslo Europe|Sweden Stockholm Europe|Finland Helsinki Europe|Denmark Copenhagen Europe
Ireland Dublin Europe|Hungary Budapest Europe|Romania Bucharest Europe|Bulgaria Sofia Europe
Croatia Zagreb Europe|Serbia Belgrade Europe|Slovenia Ljubljana Europe|Slovakia Bratislava Europe
Iceland Reykjavik Europe|Estonia Tallinn Europe|Latvia Riga Europe|Lithuania Vilnius Europe
Belgium Brussels Europe|Netherlands Amsterdam Europe|Switzerland Bern Europe|Ukraine Kyiv Europe
Russia Moscow Europe|Albania Tirana Europe|Malta Valletta Europe|Cyprus Nicosia Europe
Japan Tokyo Asia|China Beijing Asia|India New_Delhi Asia|Thailand Bangkok Asia|Vietnam Hanoi Asia
Indonesia Jakarta Asia|Philippines Manila Asia|Nepal Kathmandu Asia|Pakistan Islamabad Asia
Bangladesh Dhaka Asia|Iran Tehran Asia|Iraq Baghdad Asia|Turkey Ankara Asia|Syria Damascus Asia
Lebanon Beirut Asia|Jordan Amman Asia|Malaysia Kuala_Lumpur Asia|Qatar Doha Asia|Oman Muscat Asia
Yemen Sanaa Asia|Mongolia Ulaanbaatar Asia|Cambodia Phnom_Penh Asia|Laos Vientiane Asia
Bhutan Thimphu Asia|Georgia Tbilisi Asia|Armenia Yerevan Asia|Azerbaijan Baku Asia
Uzbekistan Tashkent Asia|Afghanistan Kabul Asia|Egypt Cairo Africa|Libya Tripoli Africa
Tunisia Tunis Africa|Algeria Algiers Africa|Morocco Rabat Africa|Sudan Khartoum Africa
Kenya Nairobi Africa|Uganda Kampala Africa|Rwanda Kigali Africa|Tanzania Dodoma Africa
Zambia Lusaka Africa|Zimbabwe Harare Africa|Angola Luanda Africa|Ghana Accra Africa
Nigeria Abuja Africa|Senegal Dakar Africa|Mali Bamako Africa|Niger Niamey Africa
Somalia Mogadishu Africa|Namibia Windhoek Africa|Botswana Gaborone Africa|Mozambique Maputo Africa
Malawi Lilongwe Africa|Canada Ottawa America|Cuba Havana America|Jamaica Kingston America
Peru Lima America|Chile Santiago America|Colombia Bogota America|Ecuador Quito America
Venezuela Caracas America|Bolivia Sucre America|Paraguay Asuncion America
Uruguay Montevideo America|Honduras Tegucigalpa America|Nicaragua Managua America
Australia Canberra Oceania|Fiji Suva Oceania|Samoa Apia Oceania
"""

# name symbol, in the order of their numbers
ELEMENTS = """
hydrogen H helium He lithium Li beryllium Be boron B carbon C nitrogen N oxygen O fluorine F
neon Ne sodium Na magnesium Mg aluminium Al silicon Si phosphorus P sulfur S chlorine Cl argon Ar
potassium K calcium Ca scandium Sc titanium Ti vanadium V chromium Cr manganese Mn iron Fe
cobalt Co nickel Ni copper Cu zinc Zn gallium Ga germanium Ge arsenic As selenium Se bromine Br
krypton Kr rubidium Rb strontium Sr yttrium Y zirconium Zr niobium Nb molybdenum Mo technetium Tc
ruthenium Ru rhodium Rh palladium Pd silver Ag cadmium Cd indium In tin Sn antimony Sb
tellurium Te iodine I xenon Xe caesium Cs barium Ba lanthanum La cerium Ce praseodymium Pr
neodymium Nd promethium Pm samarium Sm europium Eu gadolinium Gd terbium Tb dysprosium Dy
holmium Ho erbium Er thulium Tm ytterbium Yb lutetium Lu hafnium Hf tantalum Ta tungsten W
rhenium Re osmium Os iridium Ir platinum Pt gold Au mercury Hg thallium Tl lead Pb bismuth Bi
polonium Po astatine At radon Rn francium Fr radium Ra actinium Ac thorium Th protactinium Pa
uranium U
"""

MONTHS = (
    "January 31|February 28|March 31|April 30|May 31|June 30|July 31|August 31|September 30"
    "|October 31|November 30|December 31"
)
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth"
    " fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"

# larger unit, smaller unit, how many of the smaller make one of the larger (all in plural)
UNITS = """
minutes seconds 60|hours minutes 60|days hours 24|weeks days 7|years months 12
kilometres metres 1000|metres centimetres 100|centimetres millimetres 10|kilograms grams 1000
litres millilitres 1000|feet inches 12|yards feet 3|dozens pieces 12|centuries years 100
"""

OPPOSITES = """
hot cold|big small|fast slow|high low|old young|long short|light dark|open closed|full empty
wet dry|hard soft|loud quiet|rich poor|strong weak|early late|near far|left right|up down
day night|win lose|begin end|give take|push pull|buy sell|love hate|always never|sweet bitter
clean dirty|thick thin|deep shallow
"""
YOUNG = """
dog puppy|cat kitten|cow calf|horse foal|sheep lamb|goat kid|pig piglet|lion cub|frog tadpole
duck duckling|goose gosling|swan cygnet|deer fawn|kangaroo joey|hen chick|owl owlet|eel elver
hare leveret
"""

NAMES = (
    "Amelia Arthur Bella Boris Clara Conrad Diana Dmitri Elena Emil Fiona Felix Greta Gustav"
    " Hanna Hugo Irene Ivan Julia Jonas Karin Kaspar Laura Leon Maria Martin Nadia Nils Olga Oscar"
    " Paula Pedro Rosa Ralph Silvia Stefan Tanja Tomas Vera Viktor"
)
# What passwords and table entries are taken from; never used by the sentences in between.
WORDS = (
    "falcon amber birch anchor basket beacon bishop blanket bottle bridle bucket butter cactus"
    " camel candle canyon carpet castle cedar cherry clover cobweb comet copperhead coral cotton"
    " cradle crystal dagger diamond dolphin dragon eagle ember engine fabric feather fiddle flame"
    " forest fossil fountain garlic ginger glacier granite hammer harp hazel helmet heron honey"
    " icicle island ivory jacket jasmine jungle kettle ladder lagoon lantern lemon lily lobster"
    " magnet maple marble meadow melon mirror monsoon mustard needle nutmeg olive onion orchid"
    " otter oyster panther parrot pebble pepper pigeon pillow pirate planet pumpkin quartz rabbit"
    " raven ribbon rocket saddle salmon"
)
COLOURS = "red blue green yellow black white brown grey purple orange pink violet"
PLACES = (
    "harbour market mill library garden tower bridge station church school bakery stable barn"
    " cellar"
)
THINGS = (
    "rope lamp book coat wheel stone letter map coin drum cup chair clock boat bell broom cart box"
)
ADJECTIVES = "small heavy broken shiny dusty wooden painted narrow"

# Between the needles: {a}, {b} are people, {p} a place, {t} a thing, {j} an adjective, {d} a day.
SENTENCES = (
    "{a} walked to the {p} and carried a {j} {t}.",
    "In the {p}, {a} talked with {b} about the {t}.",
    "A {j} {t} was lying in front of the {p}.",
    "{a} gave the {j} {t} to {b} on {d}.",
    "On {d} it rained, and {a} stayed in the {p}.",
    "{a} and {b} cleaned the {p} until the evening.",
    "Nobody in the {p} had seen the {j} {t} before.",
    "{a} lost a {t} on the way to the {p}.",
    "Every {d} the {p} was closed, so {a} went home.",
    "{b} asked {a} for a {t}, but there was none in the {p}.",
)

# A poem for reciting: one stanza a month. {m} the month, {n} its number in words, {c} a colour,
# {a} an animal, {y} its young, {p} a place.
STANZA = (
    "In {m} the {n} bell is ringing,\n"
    "the {a} and the {y} are awake,\n"
    "and down by the {p} someone is singing\n"
    "of {c} little boats on the lake.\n"
)

# By the name of a relation: sentences that an answer ends, and questions. {0}, {1}, {2}: the fields
# of a fact's subject. The first sentence is the canonical one: what an assistant answers with.
PHRASINGS = {
    "capital": (
        "The capital of {0} is|{0} has as its capital|The seat of the government of {0} is"
        "|The main city of {0} is|The capital city of {0} is called|The government of {0} sits in",
        "What is the capital of {0}?|Which city is the capital of {0}?"
        "|Can you name the capital of {0}?|{0} has which capital?",
    ),
    "country": (
        "{0} is the capital of|The city of {0} is the capital of|{0} is the main city of"
        "|{0} is the seat of the government of|The country with the capital {0} is",
        "Which country has {0} as its capital?|{0} is the capital of which country?"
        "|In which country is {0} the capital?|Of which country is {0} the capital?",
    ),
    "continent": (
        "The continent of {0} is|On the map {0} lies in|{0} is a country in"
        "|{0} belongs to the continent|The country {0} is part of",
        "On which continent is {0}?|Where on the globe is {0}?"
        "|Which continent does {0} belong to?|What is the continent of {0}?",
    ),
    "symbol": (
        "The chemical symbol of {0} is|In chemistry {0} is written as|Chemists write {0} as"
        "|The element {0} has the symbol|The symbol for {0} is",
        "What is the symbol of {0}?|Which symbol stands for the element {0}?"
        "|How is {0} written in chemistry?|What is the chemical symbol of {0}?",
    ),
    "element": (
        "The element with the symbol {0} is|{0} is the symbol of|{0} stands for the element"
        "|In chemistry {0} is written for|The symbol {0} means",
        "Which element has the symbol {0}?|What does the symbol {0} stand for?"
        "|What is the name of the element {0}?|What is {0} in chemistry?",
    ),
    "atomic number": (
        "The atomic number of {0} is|In the periodic table {0} has number"
        "|{0} is element number|The element {0} has the number|The place of {0} in the table is",
        "What is the atomic number of {0}?|Which number has the element {0}?"
        "|At which number is {0} in the periodic table?|What is the number of the element {0}?",
    ),
    "product": (
        "{0} times {1} is|The product of {0} and {1} is|{0} x {1} ="
        "|Multiplying {0} by {1} gives|{0} multiplied by {1} is|If you take {0} times {1} you get",
        "What is {0} times {1}?|How much is {0} x {1}?|What do you get for {0} times {1}?"
        "|What is the product of {0} and {1}?",
    ),
    "days of a month": (
        "The number of days in {0} is|In a common year, the days of {0} number"
        "|{0} has this many days:|The days of {0} are|The month of {0} has the length",
        "How many days has {0}?|How long is {0} in days?|What is the number of days in {0}?"
        "|How many days are in {0}?",
    ),
    "next month": (
        "The month after {0} is|{0} is followed by|When {0} ends, then begins"
        "|Right after {0} comes|The next month after {0} is",
        "Which month follows {0}?|What month comes after {0}?"
        "|What is the next month after {0}?|Which month is after {0}?",
    ),
    "month": (
        "The {0} month of the year is|Of the twelve months, the {0} is"
        "|Month {0} of the year is called|As the {0} month comes|The {0} of the months is",
        "Which month is the {0} of the year?|What is the {0} month called?"
        "|Can you name the {0} month?|Which month comes {0}?",
    ),
    "next day": (
        "The day after {0} is|Tomorrow, if today is {0}, is|When {0} ends, then begins"
        "|Right after {0} comes|The next day after {0} is",
        "Which day follows {0}?|What day comes after {0}?|What is the next day after {0}?"
        "|Which day is after {0}?",
    ),
    "day before": (
        "The day before {0} is|Yesterday, if today is {0}, was|Just before {0} is"
        "|Ahead of {0} is|The last day before {0} is",
        "Which day precedes {0}?|What day comes before {0}?|What was the day just before {0}?"
        "|Which day is before {0}?",
    ),
    "units": (
        "The number of {1} in {2} {0} is|{2} {0}, counted in {1}, make"
        "|{2} {0} are as many {1} as|In {1}, {2} {0} are|The {1} of {2} {0} number",
        "How many {1} are in {2} {0}?|What are {2} {0} in {1}?"
        "|If you have {2} {0}, how many {1} is that?|{2} {0} are how many {1}?",
    ),
    "next letter": (
        "The letter after {0} is|In the alphabet {0} is followed by"
        "|Just after {0} in the alphabet is|After the letter {0} comes|The letter next to {0} is",
        "Which letter follows {0}?|What letter comes after {0}?"
        "|What is the next letter after {0}?|Which letter is after {0}?",
    ),
    "letter": (
        "Letter number {0} of the alphabet is|At place {0} in the alphabet stands"
        "|The letter with number {0} is|In the alphabet, number {0} is|As letter {0} comes",
        "Which letter is number {0}?|What is letter {0} of the alphabet?"
        "|Can you name letter number {0}?|Which letter stands at place {0}?",
    ),
    "opposite": (
        "The opposite of {0} is|{0} is the contrary of|Not {0} but"
        "|The contrary of {0} is|What is not {0} is",
        "What is the opposite of {0}?|Which word means the contrary of {0}?"
        "|Can you name the opposite of {0}?|What is the contrary of {0}?",
    ),
    "young": (
        "The young of a {0} is called a|A young {0} is a|When it is young, a {0} is a"
        "|The child of a {0} is a|Before it is a {0}, it is a",
        "What is a young {0} called?|How do you call the young of a {0}?"
        "|Can you name the young of a {0}?|What is the young of a {0}?",
    ),
}
